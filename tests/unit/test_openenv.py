"""Environments on a server of OpenEnv: conversations over its protocol, as `openenv-core` 0.3.0 speaks it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from specrl.config import DataConfig
from specrl.data.problems import Problem, Prompt
from specrl.data.rewards.environments import Turn, make_environment, play
from specrl.data.rewards.openenv import OpenEnv
from specrl.data.rewards.pool import RewardPool

BODY = """
from specrl.data.rewards.openenv import OpenEnv

class Guess(OpenEnv):
    url = "ws://127.0.0.1:{port}/ws"

    def parameters(self, problem):
        return {{"number": int(problem.answer)}}

    def messages(self, observation):
        return [{{"role": "user", "content": observation["hint"]}}] if observation["hint"] else []
"""
NAME = "guess_environment:Guess"


class Server:
    """Has a number guessed, in a few sessions at a time."""

    def __init__(self) -> None:
        self.free = threading.Semaphore(4)
        self.turned_away = 0

    def session(self, client: ServerConnection) -> None:
        free = self.free
        if not free.acquire(blocking=False):
            self.turned_away += 1
            client.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        try:
            number = 0
            for message in client:
                asked = json.loads(message)
                number = asked["data"].get("number", number)
                client.send(json.dumps(self.answer(asked, number)))
        finally:
            free.release()

    def answer(self, asked: dict[str, Any], number: int) -> dict[str, Any]:
        if asked["type"] == "reset":
            return observation("", None, False)
        if not (guess := asked["data"]["message"]).isdigit():
            return {"type": "error", "data": {"message": "no number", "code": "EXECUTION_ERROR"}}
        if int(guess) == number:
            return observation("right", 1.0, True)
        return observation("larger" if int(guess) < number else "smaller", 0.25, False)


def observation(hint: str, reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    own, folder = Server(), tmp_path_factory.mktemp("environments")
    with serve(own.session, "127.0.0.1", 0) as listening, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        (folder / "guess_environment.py").write_text(BODY.format(port=listening.socket.getsockname()[1]))
        patch.chdir(folder)  # where users call specrl from
        yield own


def prompt(answer: str) -> Prompt:
    return Prompt(0, "guess", [1], answer, {"question": "guess"})


def test_a_conversation_goes_over_the_servers_protocol(server: Server) -> None:
    made = make_environment(NAME)
    turn = play(made, prompt("7"), ["9", "7"])
    assert turn == Turn(({"role": "user", "content": "right"},), 1.25, done=True)
    assert "no number (EXECUTION_ERROR)" in str(play(made, prompt("7"), ["seven"]))


def test_a_server_that_is_full_is_asked_again(server: Server) -> None:
    server.free = threading.Semaphore(1)
    made: Any = make_environment(NAME)
    first, second = made(), made()
    problem = Problem("guess", "7", "", {})
    first.reset(problem)
    waiting = threading.Thread(target=second.reset, args=(problem,))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and server.turned_away
    first._session.close()
    waiting.join(30)
    assert second.step("7")[1:] == (1.0, True)
    second._session.close()


def test_it_runs_in_the_processes_of_rewards(server: Server) -> None:
    config = DataConfig(reward_network=True, reward_timeout_s=60)
    with closing(RewardPool(config, environment=NAME)) as pool:
        scoring = pool.begin(config)
        for number, text in enumerate(("5", "7")):
            scoring.submit(number, prompt("7"), (text,))
        smaller, right = scoring.results().values()
    assert smaller == Turn(({"role": "user", "content": "larger"},), 0.25)
    assert right == Turn(({"role": "user", "content": "right"},), 1.0, done=True)


def test_an_observation_is_read_as_json_unless_a_subclass_says_otherwise() -> None:
    assert OpenEnv().messages({"text": "é", "left": 2}) == [{"role": "user", "content": '{"text": "é", "left": 2}'}]
