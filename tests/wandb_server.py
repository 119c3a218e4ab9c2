"""A stand-in for a Weights & Biases server: the requests by which the library starts, resumes and fills a run."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "specrl", "entity": {"id": "e", "name": "me"}}


@dataclass
class OnlineRun:
    """What a server has of a run."""

    settings: dict[str, Any] = field(default_factory=dict)
    """The variables of the latest request that made or changed it."""
    history: list[str] = field(default_factory=list)
    """Its rows of metrics, as JSON."""
    files: dict[str, list[str]] = field(default_factory=dict)
    """The lines of its other files."""
    exit_codes: list[int] = field(default_factory=list)
    """One for each process that has ended it."""

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics, without those that the library adds."""
        rows = [json.loads(line) for line in self.history]
        found = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
        return [row for row in found if row]

    def bucket(self, name: str) -> dict[str, Any]:
        return {
            **{"id": name, "name": name, "displayName": self.settings.get("displayName"), "description": None},
            **{"config": self.settings.get("config") or "{}", "sweepName": None, "project": PROJECT, "tags": []},
            **{"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0, "notes": None},
            **{"historyTail": json.dumps(self.history[-1:]), "eventsTail": "[]", "summaryMetrics": "{}"},
            "wandbConfig": '{"t": 1}',
        }


class WandbServer(ThreadingHTTPServer):
    """Knows a run by its id, and appends to it what arrives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.runs: dict[str, OnlineRun] = {}
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """The data that answers a GraphQL query."""
        if "query Viewer" in query:
            teams = {"teams": {"edges": []}}
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}", **teams}}
        if "query ServerFeaturesQuery" in query:
            return {"serverInfo": {"features": []}}
        if "query RunResumeStatus" in query:
            run = self.runs.get(given["name"])
            return {"model": {**PROJECT, "bucket": run and run.bucket(given["name"])}}
        if "mutation UpsertBucket" in query:
            is_new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], OnlineRun())
            run.settings |= {name: value for name, value in given.items() if value is not None}
            return {"upsertBucket": {"bucket": run.bucket(given["name"]), "inserted": is_new}}
        if "mutation CreateRunFiles" in query:
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": []}}
        raise ValueError(query)

    def take(self, name: str, sent: dict[str, Any]) -> dict[str, Any]:
        """Take a part of a run's files, each beginning at a line."""
        run = self.runs[name]
        for file, part in (sent.get("files") or {}).items():
            lines = run.history if file == "wandb-history.jsonl" else run.files.setdefault(file, [])
            lines[part["offset"] :] = part["content"]
        if sent.get("complete"):
            run.exit_codes.append(sent["exitcode"])
        return {"exitcode": None, "limits": {}}


class Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        with self.server.lock:
            self.server.keys.add(self.headers.get("Authorization"))
            if self.path == "/graphql":
                found = {"data": self.server.answer(sent["query"], sent.get("variables") or {})}
            else:  # /files/ENTITY/PROJECT/RUN/file_stream
                found = self.server.take(self.path.split("/")[-2], sent)
        answer = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serve until the block ends."""
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
