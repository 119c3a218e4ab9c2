"""The recipes of CONTRIBUTING.md for rewards and algorithms, run as they stand on the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flows.cli import invoke
from specrl.algorithms.advantages import group_advantages
from specrl.algorithms.objective import TokenTargets, policy_loss
from specrl.config import Config, ConfigError, DataConfig, load_config
from specrl.config.algorithms import DRAFT_LOSSES
from specrl.config.base import import_function
from specrl.data.problems import Prompt
from specrl.data.rewards import functions as rewards
from specrl.data.rewards.environments import Turn, make_environment, play
from specrl.data.rewards.functions import make_rewards
from specrl.keys import run_keys
from specrl.tracking.tracker import Tracker
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


def follow(heading: str, toml: str, capsys: pytest.CaptureFixture[str]) -> tuple[Config, str]:
    """Write a recipe's files, and return the configuration and what a dry run of it prints."""
    write_files(heading, Path())
    assert invoke(["run", toml, "--dry-run"]) == 0
    return load_config(Path(toml)), capsys.readouterr().out


def mistake(toml: str, override: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a wrong option is refused with."""
    assert invoke(["run", toml, "--dry-run", "--set", override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def objective(config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradient and the metrics of one response of two tokens, of advantage 1, off policy by 2 and 4."""
    logprobs = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    old = -torch.tensor([[2.0, 4.0, 1.0]]).log()
    targets = TokenTargets(torch.ones(1, 3), old, old, None)
    loss, metrics = policy_loss(logprobs, torch.zeros(1, 3), torch.tensor([[True, True, False]]), targets, config.train)
    loss.backward()
    assert logprobs.grad is not None
    Tracker().log_metrics({f"policy/{name}": 0.0 for name in metrics})
    return logprobs.grad, metrics


def test_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = follow("A loss", "loss.toml", capsys)
    assert "train.loss = my_losses:capped (cap = 3.0)" in printed
    gradient, metrics = objective(config)
    assert gradient[0].tolist() == pytest.approx([-2.0, -3.0, 0.0])
    assert (metrics["ratio"].item(), metrics["capped_fraction"].item()) == pytest.approx((6.0, 1.0))
    assert "train.loss.cap = -1" in mistake("loss.toml", "train.loss.cap=-1", capsys)
    assert "train.loss.clip: unknown key; allowed here: cap" in mistake("loss.toml", "train.loss.clip=1", capsys)


def test_an_advantage_estimator(capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = follow("An advantage estimator", "advantage.toml", capsys)
    assert "train.advantage = my_advantages:above_median (scale = 2.0)" in printed
    scores, groups = [1.0, 5.0, 0.0, 5.0, 0.0], ["a", "b", "a", "b", "a"]
    assert group_advantages(scores, groups, config.train.advantage) == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert "scale = 'x'" in mistake("advantage.toml", "train.advantage.scale=x", capsys)


def test_a_correction(capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = follow("A correction", "correction.toml", capsys)
    assert "train.correction = my_corrections:sequence_tis (cap = 2.0)" in printed
    logprobs, engine = torch.zeros(1, 3), torch.tensor([[0.1, -2.0, 0.0]])
    targets = TokenTargets(torch.ones(1, 3), engine, None, None)
    _, metrics = policy_loss(logprobs, logprobs, torch.tensor([[True, True, False]]), targets, config.train)
    assert metrics["corrected_fraction"].item() == 2
    override = 'train.correction={name="my_corrections:sequence_tis", cap=0}'
    assert "train.correction.cap = 0" in mistake("correction.toml", override, capsys)


def test_a_loss_of_the_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = follow("A loss of the drafter", "draft_loss.toml", capsys)
    assert "drafter.loss = my_draft_losses:smoothed (share = 0.2)" in printed
    loss, gradient = DRAFT_LOSSES.function(config.drafter.loss)(torch.zeros(1, 4), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert loss.tolist() == pytest.approx([1.3863], abs=1e-4)
    assert gradient[0].tolist() == pytest.approx([-0.6, 0.2, 0.2, 0.2])
    assert "drafter.loss.share = 2" in mistake("draft_loss.toml", "drafter.loss.share=2", capsys)
    before = run_keys(config, "code")
    Path("my_draft_losses.py").write_text(Path("my_draft_losses.py").read_text() + "\n# changed\n")
    after = run_keys(config, "code")
    assert [stage for stage in before if before[stage] == after[stage]] == ["prepare"]


def test_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = follow("A reward", "reward.toml", capsys)
    assert "data.reward = my_rewards:brevity" in printed
    reward = make_rewards(config.data)[0]
    prompt = Prompt(0, "Q", [1], "42", {})
    assert (reward(prompt, " 42"), reward(prompt, "It is 42.")) == (1.0, 0.0)


def test_a_reward_registered_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_REGISTERED", dict(rewards._REGISTERED))
    write_files("A reward", Path())
    rewards.register_reward("brevity")(import_function("data.reward", "my_rewards:brevity"))
    reward = make_rewards(DataConfig(reward="brevity"))[0]
    assert reward(Prompt(0, "Q", [1], "42", {}), "42") == 1.0
    with pytest.raises(ConfigError, match=r"brevity or package\.module:function"):
        make_rewards(DataConfig(reward="brevvity"))


def test_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    config, printed = follow("An environment", "environment.toml", capsys)
    assert "environment.name = my_environments:Dice, for at most 3 turns" in printed
    made, prompt = make_environment(str(config.environment.name)), Prompt(0, "Q", [1], "", {})
    assert play(made, prompt, ["throw"]) == Turn(({"role": "user", "content": " 4\n"},))
    assert play(made, prompt, ["throw", "throw", "enough"]) == Turn((), 6.0, done=True)


def test_a_changed_file_of_ones_own_is_a_new_train_stage(capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = follow("A loss", "loss.toml", capsys)
    before = run_keys(config, "code")
    Path("my_losses.py").write_text(Path("my_losses.py").read_text() + "\n# changed\n")
    after = run_keys(config, "code")
    assert before["train"] != after["train"] and before["calibrate"] == after["calibrate"]
