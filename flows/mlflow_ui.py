"""MLflow's server with a token, which `specrl ui` starts through MLflow's own plug-in `mlflow.app`.

The server listens on the loopback interface, which every user of a login node can reach, and can read and change the
results of all runs. Requests therefore need the token: in the address that `specrl ui` prints, from which it moves into
a cookie, or as `Authorization: Bearer TOKEN`, which MLflow's clients send if `MLFLOW_TRACKING_TOKEN` is set.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response

TOKEN = "SPECRL_UI_TOKEN"  # the environment variable that passes the token to the server's processes
COOKIE = "specrl-ui-token"
UNPROTECTED = frozenset({"/health"})  # paths that only tell whether the server is up


class TokenGuard:
    """An ASGI application that passes requests with the token to another application."""

    def __init__(self, application: Any, token: str) -> None:
        self._application, self._token = application, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or scope["path"] in UNPROTECTED or self._is_known(HTTPConnection(scope)):
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._answer(HTTPConnection(scope))(scope, receive, send)

    def _is_known(self, connection: HTTPConnection) -> bool:
        bearer = connection.headers.get("authorization", "").removeprefix("Bearer ")
        return self._matches(bearer) or self._matches(connection.cookies.get(COOKIE, ""))

    def _answer(self, connection: HTTPConnection) -> Response:
        if not self._matches(connection.query_params.get("token", "")):
            return PlainTextResponse("This server needs the token in the address that `specrl ui` printed.\n", 403)
        answer = RedirectResponse(connection.url.path, 303)
        answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        return answer

    def _matches(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


def make_application() -> TokenGuard:
    """Make MLflow's application behind the token; MLflow calls this in each server process."""
    from mlflow.server.fastapi_app import app

    return TokenGuard(app, os.environ[TOKEN])
