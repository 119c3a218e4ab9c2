"""MLflow's server with a token, which `specrl ui` starts through MLflow's own plug-in `mlflow.app`.

The server listens on the loopback interface, which every user of a login node can reach, and it reads and changes the
results of all runs. A request therefore needs the token: in the address that `specrl ui` prints, from which it moves
into a cookie, or as `Authorization: Bearer TOKEN`, which MLflow's clients send if `MLFLOW_TRACKING_TOKEN` is set.
"""

from __future__ import annotations

import hmac
import os
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs

TOKEN = "SPECRL_UI_TOKEN"
"""The environment variable that passes the token to the server's processes."""
COOKIE = "specrl-ui-token"
UNPROTECTED = frozenset({"/health"})
"""The paths that say only that the server is up."""


class TokenGuard:
    """An ASGI application that lets requests with the token through to another application."""

    def __init__(self, application: Any, token: str) -> None:
        self._application, self._token = application, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or scope["path"] in UNPROTECTED or self._is_known(scope):
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif self._matches(parse_qs(scope["query_string"].decode()).get("token", [""])[0]):
            cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, {"location": scope["path"], "set-cookie": cookie}, "")
        else:
            await _answer(send, 403, {}, "This server needs the token in the address that `specrl ui` printed.\n")

    def _is_known(self, scope: Any) -> bool:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return self._matches(bearer) or (cookie is not None and self._matches(cookie.value))

    def _matches(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


async def _answer(send: Any, status: int, headers: dict[str, str], text: str) -> None:
    lines = {"content-type": "text/plain; charset=utf-8", **headers}
    encoded = [(name.encode(), value.encode()) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})


def make_application() -> TokenGuard:
    """MLflow's application behind the token; MLflow calls this in each of its server's processes."""
    from mlflow.server.fastapi_app import app

    return TokenGuard(app, os.environ[TOKEN])
