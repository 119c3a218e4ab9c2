"""The recipes of CONTRIBUTING.md for rewards and algorithms, run as they stand on the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import invoke
from specrl.config import load_config
from specrl.data.prompts import Prompt
from specrl.data.rewards import make_reward
from tests.contributing import write_files


@pytest.fixture(autouse=True)
def in_an_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each recipe lie where a user would write it, and let none of its modules outlive its test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_reward(tmp_path: Path) -> None:
    write_files("A reward", tmp_path)
    assert invoke(["run", "reward.toml", "--dry-run"]) == 0
    reward = make_reward(load_config(Path("reward.toml")).data)
    prompt = Prompt(0, "Q", [1], "42", {})
    assert (reward(prompt, " 42"), reward(prompt, "It is 42.")) == (1.0, 0.0)
