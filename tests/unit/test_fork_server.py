"""The process from which local jobs are forked: its environment, and what happens when it is killed."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm.environment import ROOT, THREAD_VARIABLES
from slurm.local import backend, fork_server
from slurm.local.fork_server import ForkServer, Order, ServerKilledError, unchanged


def order(folder: Path) -> Order:
    """A controller that finds its stage finished, and ends."""
    (folder / "result.json").touch()
    return Order([str(folder), str(folder / "record.json"), str(folder / "result.json")], {}, os.devnull, None)


def start(folder: Path, *setup: str) -> ForkServer:
    return ForkServer(setup, {**os.environ, "PYTHONPATH": str(ROOT)}, folder / "log")


def test_libraries_have_one_thread_whatever_the_set_up_lines_say(tmp_path: Path) -> None:
    shown = tmp_path / "environment"  # by the shell, before each of its commands
    server = start(
        tmp_path, *(f"export {name}=8" for name in THREAD_VARIABLES), "export OTHER=8", f"trap 'env >{shown}' DEBUG"
    )
    try:
        assert server.fork(order(tmp_path)) > 0
        found = shown.read_text().splitlines()
    finally:
        server.close()
    assert {f"{name}=1" for name in THREAD_VARIABLES} | {"OTHER=8"} <= set(found)


def test_what_set_up_lines_changed_counts_more_than_the_value_of_the_flow() -> None:
    flow = {"CUDA_VISIBLE_DEVICES": "0,1", "OTHER": "1"}
    unset = {"CUDA_VISIBLE_DEVICES": None, "OTHER": None}
    assert unchanged(flow, unset, {}) == flow
    assert unchanged(flow, unset, {"CUDA_VISIBLE_DEVICES": "2,3"}) == {"OTHER": "1"}
    given = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "OTHER": None}
    assert unchanged(flow, given, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == flow
    assert unchanged(flow, given, {}) == {"OTHER": "1"}


def test_a_server_that_is_killed_is_told_from_set_up_lines_that_fail(tmp_path: Path) -> None:
    with pytest.raises(ServerKilledError, match="ended at once"):
        start(tmp_path, "kill -KILL $$").fork(order(tmp_path))
    server = start(tmp_path, "exit 3")
    with pytest.raises(fork_server.JobError, match="ended at once") as caught:
        server.fork(order(tmp_path))
    assert not isinstance(caught.value, ServerKilledError)
    server.close()  # a second time


def test_a_forks_whole_command_is_shown_however_small_the_environment(tmp_path: Path) -> None:
    """A title has the room of the process's own arguments and environment, and is cut off beyond it."""
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    log = tmp_path / "log.pipe"
    os.mkfifo(log)
    server = ForkServer((), {"PYTHONPATH": str(ROOT)}, tmp_path / "log")
    controller = psutil.Process(server.fork(replace(order(folder), log=str(log))))
    try:
        deadline = time.monotonic() + 120
        while "slurm.local.controller" not in (words := controller.cmdline()):  # it waits for its log to be read
            assert time.monotonic() < deadline
    finally:
        server.close()
        controller.kill()
    assert words[4:] == order(folder).arguments


def test_a_killed_server_is_replaced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        def fork(self, order: Order) -> int:
            answer = answers.pop(0)
            if answer is None:
                raise ServerKilledError("killed")
            return answer

    def found(*_: object) -> Server:
        return Server()

    answers = [None, 7, None, None, 8]
    monkeypatch.setattr(backend, "_fork_server", found)
    request: Any = None
    assert backend._forked(request, {}, order(tmp_path)) == 7
    with pytest.raises(ServerKilledError):
        backend._forked(request, {}, order(tmp_path))


def test_a_stage_whose_modules_cannot_be_imported_is_left_to_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(stages: object) -> None:
        raise ImportError("no such library")

    monkeypatch.setattr(fork_server, "_load", fail)
    fork_server._load_or_say(["train"])
    assert "ImportError: no such library" in capsys.readouterr().err
