"""A base class for environments on an OpenEnv server, over its WebSocket protocol.

https://github.com/meta-pytorch/OpenEnv, `openenv/core/env_server`.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from specrl.data.problems import Problem

FULL = "CAPACITY_REACHED"  # all sessions of the server are taken
RETRY_SECONDS = 0.2


class OpenEnv:
    """An environment in its own session on a server; a subclass defines the address and the messages."""

    url: str
    """The address of the server's sessions, such as `ws://node7:8000/ws`."""

    def parameters(self, problem: Problem) -> dict[str, Any]:
        """The arguments of the server's `reset` for a problem, such as a seed or a task."""
        del problem
        return {}

    def action(self, text: str) -> dict[str, Any]:
        """Convert a turn of the policy to an action."""
        return {"message": text}

    def messages(self, observation: dict[str, Any]) -> list[dict[str, str]]:
        """Convert an observation to messages for the policy."""
        return [{"role": "user", "content": json.dumps(observation, ensure_ascii=False)}]

    def reset(self, problem: Problem) -> list[dict[str, str]]:
        """Open a session, waiting while all are taken; RuntimeError if the server reports an error."""
        while True:
            self._session = connect(self.url, proxy=None, max_size=None)
            found = self._ask("reset", self.parameters(problem))
            if found.get("code") != FULL:
                return self.messages(found.get("observation") or {})
            self._session.close()
            time.sleep(RETRY_SECONDS)

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        """Take an action; a missing reward counts as 0. RuntimeError if the server reports an error."""
        found = self._ask("step", self.action(text))
        return self.messages(found.get("observation") or {}), float(found.get("reward") or 0.0), bool(found.get("done"))

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        with suppress(ConnectionClosed):  # a full server says so at once and hangs up
            self._session.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._session.recv())
        found: dict[str, Any] = answer["data"]
        if answer["type"] == "error" and found.get("code") != FULL:
            raise RuntimeError(f"{self.url}: {found.get('message')} ({found.get('code')})")
        return found
