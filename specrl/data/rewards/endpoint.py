"""A base class for environments that run their own loop and call a model, like those of verifiers and most agents.

The policy is offered to them as a server of OpenAI's chat completions API, in this process.
"""

from __future__ import annotations

import json
import secrets
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler
from queue import SimpleQueue
from socketserver import ThreadingTCPServer
from typing import Any

from specrl.data.problems import Problem

REFUSED = ("tools", "functions", "logprobs", "response_format")  # options of a request that would have no effect here
Messages = list[dict[str, str]]
Event = tuple[Messages, Future[str]] | float | Exception
"""A rollout's next event: it asks for a turn, ends with a reward, or fails."""


class PolicyEndpoint:
    """An environment that asks the policy for its turns; a subclass defines how one rollout runs."""

    host = "127.0.0.1"
    """The host on which the policy is served; set this machine's name if the rollout runs on another."""

    def rollout(self, problem: Problem, base_url: str) -> float:
        """Run one conversation with the model at `base_url`, which ends in `/v1`; return its reward."""
        raise NotImplementedError

    def reset(self, problem: Problem) -> Messages:
        """Begin the rollout and return its first request; raises what the rollout raises."""
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._conversation: Messages = []
        server = _Server(self.host, self._events)
        for work in (server.serve_forever, lambda: self._run(problem, server.base_url)):
            threading.Thread(target=work, daemon=True).start()
        messages, _, done = self._next()
        if done:
            raise RuntimeError("the rollout ended before it asked for a turn")
        return messages

    def step(self, text: str) -> tuple[Messages, float, bool]:
        """Answer the rollout's request; return what the next one adds, or the reward. Raises what the rollout raises.

        RuntimeError: The next request belongs to another conversation.
        """
        self._conversation.append({"role": "assistant", "content": text})
        self._turn.set_result(text)
        return self._next()

    def _run(self, problem: Problem, base_url: str) -> None:
        try:
            self._events.put(float(self.rollout(problem, base_url)))
        except Exception as error:  # `step` waits for it
            self._events.put(error)
        except BaseException as error:  # such as a cancelled task, which would end the process
            self._events.put(RuntimeError(f"the rollout ended with {type(error).__name__}: {error}"))

    def _next(self) -> tuple[Messages, float, bool]:
        event = self._events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, float):
            return [], event, True
        known, (messages, self._turn) = len(self._conversation), event
        if messages[:known] != self._conversation:
            raise RuntimeError("the rollout asked for a turn of another conversation, or changed what was said before")
        self._conversation = messages
        return messages[known:], 0.0, False


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, host: str, events: SimpleQueue[Event]) -> None:
        super().__init__((host, 0), _Handler)
        self.events = events
        self.path = f"/{secrets.token_hex(16)}/v1"  # another process may take the port a moment later
        self.base_url = f"http://{host}:{self.server_address[1]}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        if self.path != f"{self.server.path}/chat/completions":
            self.send_error(404)
            return
        turn: Future[str] = Future()
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.server.events.put((_messages(body), turn))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.server.events.put(error)
            self.send_error(400, str(error))
            return
        self._answer(turn.result(), body.get("model"), streams=bool(body.get("stream")))

    def _answer(self, text: str, model: Any, *, streams: bool) -> None:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "delta" if streams else "message": message, "finish_reason": "stop"}
        kind = "chat.completion.chunk" if streams else "chat.completion"
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)  # not counted here
        about = {"id": "turn", "object": kind, "created": 0, "model": model, "usage": usage}
        found = json.dumps({**about, "choices": [choice]})
        content = (f"data: {found}\n\ndata: [DONE]\n\n" if streams else found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _messages(body: dict[str, Any]) -> Messages:
    calls = any(message.get("tool_calls") for message in body["messages"])
    if refused := "tools" if calls else next((key for key in REFUSED if body.get(key)), None):
        raise ValueError(f"the rollout's request has {refused}, and the turns of a policy are text alone")
    if body.get("n") not in (None, 1):
        raise ValueError(f"the rollout's request has n = {body['n']}, and there is one turn at a time")
    return [{"role": message["role"], "content": _text(message.get("content"))} for message in body["messages"]]


def _text(content: str | list[dict[str, str]] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    if any(part["type"] != "text" for part in content):
        raise ValueError("the rollout's request has images or sound, and the policy reads text")
    return "".join(part["text"] for part in content)
