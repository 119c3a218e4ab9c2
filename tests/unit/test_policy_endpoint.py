"""Environments that own their loop: a real client of the protocol asks the policy for its turns."""

from __future__ import annotations

import json
import re
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from openai import OpenAI

from specrl.config import DataConfig
from specrl.data.problems import Problem, Prompt
from specrl.data.rewards.endpoint import PolicyEndpoint
from specrl.data.rewards.environments import Turn, make_environment, play
from specrl.data.rewards.pool import RewardPool

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "environments.md"
BODY = """
from openai import OpenAI
from specrl.data.rewards.endpoint import PolicyEndpoint

class Guess(PolicyEndpoint):
    def rollout(self, problem, base_url):
        return guess(problem.answer, base_url)

def guess(number, base_url, stream=False):
    client, said = OpenAI(base_url=base_url, api_key="none"), [{"role": "user", "content": "Guess!"}]
    for turn in range(3):
        found = client.chat.completions.create(model="policy", messages=said, stream=stream)
        if stream:
            text = "".join(part.choices[0].delta.content for part in found)
        else:
            text = found.choices[0].message.content
        if text == number:
            return 1.0 / (1 + turn)
        hint = {"type": "text", "text": "larger" if int(text) < int(number) else "smaller"}
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": [hint]}]
    return 0
"""
FIRST = ({"role": "user", "content": "Guess!"},)


def prompt(answer: str = "7", **entry: Any) -> Prompt:
    return Prompt(0, "guess", [1], answer, {"question": "guess", "entry": entry})


def guess(*arguments: Any, **options: Any) -> float:
    scope: dict[str, Any] = {}
    exec(BODY, scope)
    found: float = scope["guess"](*arguments, **options)
    return found


def environment(rollout: Callable[[Problem, str], Any]) -> Callable[[], PolicyEndpoint]:
    return type("Own", (PolicyEndpoint,), {"rollout": lambda _, problem, base_url: rollout(problem, base_url)})


@pytest.mark.parametrize("stream", [False, True])
def test_a_rollout_is_played_turn_by_turn(stream: bool) -> None:
    made = environment(lambda problem, base_url: guess(problem.answer, base_url, stream=stream))
    assert play(made, prompt(), []) == Turn(FIRST)
    assert play(made, prompt(), ["9"]) == Turn(({"role": "user", "content": "smaller"},))
    assert play(made, prompt(), ["9", "7"]) == Turn((), 0.5, done=True)
    assert play(made, prompt(), ["1", "2", "3"]) == Turn((), 0.0, done=True)


def ask(base_url: str, *messages: dict[str, Any], **options: Any) -> str:
    client: Any = OpenAI(base_url=base_url, api_key="none")
    said = messages or FIRST
    found = client.chat.completions.create(model="policy", messages=list(said), **options)
    return str(found.choices[0].message.content)


def cancelled() -> float:
    raise CancelledError("gone")


TOOL = {"type": "function", "function": {"name": "look"}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}


@pytest.mark.parametrize(
    ("rollout", "texts", "reason"),
    [
        (lambda _, url: ask(url, tools=[TOOL]), [], "has tools, and the turns of a policy are text"),
        (lambda _, url: ask(url, logprobs=True), [], "has logprobs, and the turns of a policy are text"),
        (lambda _, url: cancelled(), [], "the rollout ended with CancelledError: gone"),
        (lambda _, url: ask(url, n=2), [], "has n = 2, and there is one turn at a time"),
        (lambda _, url: ask(url, IMAGE), [], "has images or sound, and the policy reads text"),
        (lambda _, url: [ask(url), ask(url)], ["a"], "asked for a turn of another conversation"),
        (lambda _, url: 1.0, [], "the rollout ended before it asked for a turn"),
        (lambda _, url: [ask(url)].index("b"), ["a"], "raised ValueError: 'b' is not in list"),
        (lambda _, url: ask(url), ["a"], "raised ValueError: could not convert string to float: 'a'"),
    ],
)
def test_what_is_no_conversation_of_texts_fails_in_one_line(
    rollout: Callable[[Problem, str], Any], texts: list[str], reason: str
) -> None:
    assert reason in str(play(environment(rollout), prompt(), texts))


def test_requests_at_the_same_time_are_two_conversations() -> None:
    def rollout(_: Problem, base_url: str) -> float:
        both = [threading.Thread(target=ask, args=(base_url,), daemon=True) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join()
        return 1.0

    made = environment(rollout)
    assert play(made, prompt(), []) == Turn(FIRST)
    assert "another conversation" in str(play(made, prompt(), ["a"]))


def test_only_who_was_given_the_address_is_answered() -> None:
    def rollout(_: Problem, base_url: str) -> float:
        with pytest.raises(HTTPError, match="404"):
            urlopen(re.sub(r"[0-9a-f]{32}", "0" * 32, base_url) + "/chat/completions", b"{}")
        return float(ask(base_url))

    assert play(environment(rollout), prompt(), ["3"]) == Turn((), 3.0, done=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where users call specrl from
    return tmp_path


def results(name: str, *conversations: tuple[str, ...], **entry: Any) -> list[Any]:
    config = DataConfig(reward_network=True, reward_timeout_s=60)
    with closing(RewardPool(config, environment=name)) as pool:
        scoring = pool.begin(config)
        for number, texts in enumerate(conversations):
            scoring.submit(number, prompt(**entry), texts)
        return list(scoring.results().values())


def test_it_runs_in_the_processes_of_rewards(folder: Path) -> None:
    (folder / "endpoint_environment.py").write_text(BODY)
    smaller, right = results("endpoint_environment:Guess", ("9",), ("9", "7"))
    assert smaller == Turn(({"role": "user", "content": "smaller"},))
    assert right == Turn((), 0.5, done=True)


class Service(BaseHTTPRequestHandler):
    """What the guide's service of verifiers answers, and how it uses the policy."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps({"reward": guess(str(asked["task"]), asked["base_url"], stream=True)}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_guides_environment_of_verifiers_works(folder: Path, service: str) -> None:
    (code,) = re.findall(r"^```python\n# my_game.py\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert code.count("127.0.0.1:8900") == 1
    (folder / "my_game.py").write_text(code.replace("127.0.0.1:8900", service))
    assert callable(make_environment("my_game:Game"))
    first, right = results("my_game:Game", (), ("3", "4"), task=4)
    assert first == Turn(FIRST)
    assert right == Turn((), 0.5, done=True)
