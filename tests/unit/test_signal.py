"""A run that learns nothing says so: after how many steps, how often, and why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flows.cli import invoke
from specrl.config import parse_config
from specrl.distributed import Ranks
from specrl.events import read_events
from specrl.loop import Trainer
from specrl.step_record import StepRecorder
from specrl.tracking.tracker import Tracker
from specrl.validation.stopping import lost_signals
from tests.unit.test_loop import record_of

CONFIG = parse_config({"name": "x", "model": {"source": "tiny"}, "train": {"num_steps": 40}})
HEALTHY = {
    "reward/mean": 0.4,
    "reward/std": 0.5,
    "reward/zero_std_fraction": 0.3,
    "reward/failures": 0.0,
    "rollout/truncated_fraction": 0.1,
    "policy/grad_norm": 0.2,
    "policy/entropy": 1.0,
}
SAME = {"reward/std": 0.0, "reward/zero_std_fraction": 1.0, "policy/grad_norm": 0.0}


def said(changes: dict[str, float], steps: int = 5) -> list[str]:
    return lost_signals([HEALTHY, *[HEALTHY | changes] * steps][-6:], HEALTHY, CONFIG)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (SAME | {"reward/mean": 0.0}, ["nothing was learned: all responses earned the same reward, 0", "too hard"]),
        (SAME | {"reward/mean": 1.0}, ["the same reward, 1", "too easy"]),
        (SAME | {"reward/mean": 0.0, "rollout/truncated_fraction": 0.9}, ["the same reward", "90% of the responses"]),
        (SAME | {"reward/failures": 16.0}, ["the reward failed on 16 responses"]),
        (SAME | {"reward/std": 0.5}, ["in each group all responses earned the same reward", "always or never"]),
        ({"policy/grad_norm": 0.0}, ["the gradient of the policy was 0"]),
        ({"rollout/truncated_fraction": 1.0}, ["all responses were cut off at sampling.max_response_tokens = "]),
        ({"policy/entropy": 0.04}, ["its entropy was 0.04 nats a token, after 1 in the first; likely policy.lr"]),
        ({"policy/entropy": 0.004}, ["its entropy was 0.004"]),
    ],
)
def test_what_says_that_nothing_is_learned_is_said_once_with_the_likely_reason(
    changes: dict[str, float], words: list[str]
) -> None:
    (line,) = said(changes)
    assert line.startswith("for 5 steps ") and all(word in line for word in words), line
    assert said(changes, steps=4) == said(changes, steps=6) == said({}) == []


def test_a_short_run_says_it_at_its_end_and_a_restarted_step_says_it_again_in_place_of_before(tmp_path: Path) -> None:
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    recorder = StepRecorder(ranks, Tracker(), tmp_path / "rollouts", tmp_path / "steps")
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"num_steps": 2})})
    trainer = cast(Any, SimpleNamespace(ranks=ranks, recorder=recorder, config=config))
    for first in (0, 1):  # the second time after a kill
        recorder.drop_from(first)
        for step in range(first, 2):
            record = record_of(step, HEALTHY | SAME)
            Trainer.report_lost_signals(trainer, record)
            recorder.write(record)
    (event,) = read_events(tmp_path)
    assert (event.kind, event.step) == ("signal", 1) and event.text.startswith("for 2 steps nothing was learned")


def test_a_dry_run_says_that_a_reward_does_not_tell_right_from_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {
        "zero": "return 0.0",
        "none": "return None",
        "length": "return float(len(response))",
        "broken": "return 1 / 0",
    }
    text = "".join(f"def {name}(prompt, response, answer):\n    {body}\n\n\n" for name, body in rewards.items())
    (tmp_path / "rewards_here.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, words in {
        "zero": "both earn 0",
        "none": "both earn None",
        "length": "",
        "broken": "it fails on a response",
    }.items():
        command = ["run", "configs/smoke.toml", "--dry-run", "--set", f"runs_dir={tmp_path / 'runs'}"]
        assert invoke([*command, "--set", f"data.reward=rewards_here:{name}"]) == 0
        warned = " ".join(capsys.readouterr().err.split())
        assert words in warned if words else "data.reward" not in warned
        assert ("nothing is learned" in warned) == (name == "zero")
    command += ["--set", 'data.reward=[{ name = "task", weight = 0.0 }]']
    assert invoke(command) == 0 and "each part has weight 0" in " ".join(capsys.readouterr().err.split())
