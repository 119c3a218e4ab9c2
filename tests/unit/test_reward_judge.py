"""The reward of a judge, asked over HTTP as OpenAI's protocol has it, by a server that answers in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specrl.config import ConfigError, DataConfig
from specrl.data.rewards.functions import make_rewards
from specrl.data.rewards.judge import read_score
from tests.unit.test_reward_parts import scored

KEY = "a-key-of-the-test"


class Server(ThreadingHTTPServer):
    """Answers a question about a response with a score for each `counted` in it, and in other ways where it says so."""

    def __init__(self, counted: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.counted = counted
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        with self.server.lock:
            times = sum(asked["messages"][0]["content"] == text for asked in self.server.asked)
            self.server.asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
        if "busy" in text and not times:
            self.send_error(503)
        elif "forbidden" in text:
            self.send_error(401)
        elif "elsewhere" in text:
            self.send_response(302)
            self.send_header("Location", f"{self.server.url}/other")
            self.end_headers()
        elif "slow" in text:
            threading.Event().wait(2)
        elif "strange" in text:
            self.answer(b"{}")
        else:
            score = text.count(self.server.counted)
            said = "Score: 9 of it is\nmine." if "rambling" in text else f"It is so.\n**Score: {score}**\n"
            self.answer(json.dumps({"choices": [{"message": {"content": said}}]}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(counted: str = "!") -> Iterator[Server]:
    found = Server(counted)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


def data(url: str, parameters: dict[str, Any] | None = None, **settings: Any) -> DataConfig:
    own = {"url": url, "model": "judge", "seconds": 1.0, "template": "{prompt}|{answer}|{response}"}
    part = {"name": "judge", "parameters": own | (parameters or {})}
    values = {"source": "file", "path": "rows.jsonl", "reward": [part], "reward_network": True}
    return DataConfig.model_validate(values | settings)


def test_a_judge_is_asked_about_each_response_and_its_last_line_counts(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    section = data(server.url, {"key_variable": "JUDGE_KEY"}, reward_environment=("JUDGE_KEY",))
    found = scored(section, ["{answer}!!", "busy !", "no", "<think>!!!</think>!"], "A")
    assert found.rewards == [0.2, 0.1, 0.0, 0.1] and not found.failures
    asked = {one["messages"][0]["content"]: one for one in server.asked}
    assert asked["Q|A|{answer}!!"] == {
        "model": "judge",
        "messages": [{"role": "user", "content": "Q|A|{answer}!!"}],
        "temperature": 0,
        "path": "/v1/chat/completions",
        "key": f"Bearer {KEY}",
    }


def test_what_gives_no_score_is_a_failure_in_one_line_without_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    section = data(server.url, {"key_variable": "JUDGE_KEY"}, reward_environment=("JUDGE_KEY",), reward_on_failure=-1.0)
    before = len(server.asked)
    found = scored(section, ["forbidden", "elsewhere", "slow", "strange", "rambling", "!" * 11])
    assert found.rewards == [-1.0] * 6
    reasons = [failure.reason for failure in found.failures]
    expected = ["answers 401", "answers 302", "cannot be reached: ", "something else", "no 'Score: N'", "no 'Score: N'"]
    for reason, words in zip(reasons, expected, strict=True):
        assert words in reason and "\n" not in reason and KEY not in reason
    assert len(server.asked) - before == 7  # what is slow is asked twice, and nobody is asked elsewhere
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\u20ac")
    [failure] = scored(section, ["!"]).failures
    assert failure.reason == "raised ValueError: the environment variable JUDGE_KEY holds no key"


def test_a_server_that_is_not_there_is_a_failure(server: Server) -> None:
    [failure] = scored(data("http://127.0.0.1:9", {"retries": 0}), ["!"]).failures
    assert failure.reason.startswith("raised ValueError: the judge at http://127.0.0.1:9 cannot be reached: ")


@pytest.mark.parametrize(
    "said",
    ["", "10/10", "Score: 11", "Score: -1", "Score: 5 of 10", "Score: nan", "Score: 3\nor so", "Score: 4/5"],
)
def test_only_a_last_line_with_a_score_counts(said: str) -> None:
    assert read_score("Score: 1\nwell\n\n Score: 7.5 \n", 10.0) == 7.5
    for line in ("**Score: 7.5 / 10**.", "Score: **7.5**/10", "Score: 7.5/10.0"):
        assert read_score(line, 10.0) == 7.5
    with pytest.raises(ValueError, match="the judge's last line is no 'Score: N' with N from 0 to 10"):
        read_score(said, 10.0)


@pytest.mark.parametrize(
    ("parameters", "settings", "message"),
    [
        ({}, {"reward_network": False}, r"^data\.reward_network = false: a judge is asked over"),
        ({"key_variable": "KEY"}, {}, r"^data\.reward_environment must name key_variable = KEY, too"),
        ({"seconds": 20.0}, {}, r"^data\.reward_timeout_s = 30: it must be above 41, what the judge"),
        ({"template": "Judge {prompt}"}, {}, r"data\.reward\.judge\.template = .* should match pattern .*response"),
        ({"url": "judge.example"}, {}, r"data\.reward\.judge\.url = .* should match pattern .*http"),
        ({"retries": 9}, {}, r"data\.reward\.judge\.retries = 9: "),
    ],
)
def test_a_judge_that_could_not_be_asked_is_refused(
    parameters: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_rewards(data("http://127.0.0.1:9", parameters, **settings))
    assert "\n" not in str(error.value)
