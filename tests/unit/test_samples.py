"""`specrl samples` and the samples on the report page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from flows.cli import invoke
from specrl.artifacts import PrepareResult, write_result, write_text
from specrl.config import dump_config, parse_config
from specrl.report.html import read_columns, write_report
from specrl.report.samples import PAGE_CHARACTERS, PAGE_STEPS
from specrl.schemas import Rollout, rollout_path, write_rollouts

WORDS = ["one", "two", "three", "</pre><script>alert(1)</script>"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with three steps on two ranks; each response is its own reward in words."""
    config = parse_config({"name": "demo", "runs_dir": str(tmp_path)})
    write_text(config.run_dir / "config.json", dump_config(config))
    policy = config.run_dir / "stages" / "prepare-0" / "policy"
    policy.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(policy / "tokenizer.json"))
    write_result(policy.parent, PrepareResult(policy_dir=policy, seconds=1.0))
    for step in range(3):
        write_step(config.run_dir, step)
    return config.run_dir


def write_step(run_dir: Path, step: int) -> None:
    for rank in range(2):
        rollouts = [
            Rollout(
                step=step,
                rank=rank,
                prompt_id=10 * step + rank,
                sample=sample,
                policy_version=step,
                drafter_version=step,
                seed=sample,
                prompt_tokens=[3, rank],
                response_tokens=[sample] * (sample + 1),
                generation_logprobs=[-0.5] * (sample + 1),
                response="" if sample == 0 else f"<b>reward {rank + sample}</b> \x1b[31m",
                answer="42",
                finish_reason="stop",
                reward=float(rank + sample),
            )
            for sample in range(3)
        ]
        write_rollouts(rollout_path(run_dir / "stages" / "train-0" / "rollouts", step, rank), rollouts)


def test_the_best_the_worst_and_the_longest_of_a_step(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["samples", "demo", "--runs-dir", str(run_dir.parent)]
    assert invoke([*arguments, "--best", "2", "--worst", "1", "--longest", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["step"], found["num_responses"], found["reward_mean"]) == ("demo", 2, 6, 1.5)
    assert [sample["reward"] for sample in found["chosen"]["best"]] == [3.0, 2.0]
    (worst,) = found["chosen"]["worst"]
    assert (worst["reward"], worst["response"]) == (0.0, "one")  # decoded: the table has no text
    assert worst["prompt"] == f"{WORDS[3]} one"
    assert found["chosen"]["longest"][0]["num_tokens"] == 3
    assert invoke([*arguments, "--step", "1"]) == 0
    output = capsys.readouterr().out
    assert "step 1: 6 responses, mean reward 1.500" in output
    assert "step 1, prompt 11, sample 2: reward 3.000, 3 tokens, stop" in output
    assert "\x1b" not in output  # a response cannot drive the terminal
    assert "\\x1b[31m" in output


def test_the_words_of_an_environment_are_not_in_the_lengths_of_responses(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_dir / "stages" / "train-0" / "rollouts"
    talk = Rollout(3, 0, 30, 0, 3, 3, 0, [1], [0] * 9, [-0.5] * 2, "talk", "", "stop", turns=[1, 7, 1])
    plain = Rollout(3, 0, 30, 1, 3, 3, 1, [1], [0] * 3, [-0.5] * 3, "plain", "", "stop")
    write_rollouts(rollout_path(folder, 3, 0), [talk, plain])
    assert invoke(["samples", "demo", "--runs-dir", str(run_dir.parent), "--longest", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["chosen"]["longest"]
    assert [(sample["response"], sample["num_tokens"]) for sample in found] == [("plain", 3), ("talk", 2)]
    steps, _, lengths = read_columns(folder)
    assert lengths[steps == 3].tolist() == [2, 3]


def test_a_step_without_rollouts_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["samples", str(run_dir), "--step", "7"]) == 2
    assert capsys.readouterr().err == "specrl: --step 7: run demo has rollouts of steps 0 to 2\n"


def test_the_page_has_the_samples_by_step_and_escapes_them(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    steps = re.findall(r'<details name="step"( open)?>\s*<summary>Step (\d+)', page)
    assert steps == [("", "0"), ("", "1"), (" open", "2")]
    assert "&lt;b&gt;reward 3&lt;/b&gt;" in page
    assert "<b>reward" not in page
    assert "<script>alert" not in page


def test_the_page_stays_small(run_dir: Path) -> None:
    path = rollout_path(run_dir / "stages" / "train-0" / "rollouts", 1, 0)
    for step in range(3, PAGE_STEPS + 5):
        write_step(run_dir, step)
    rollout = Rollout(1, 0, 1, 0, 1, 1, 0, [1], [1] * 99, [-1.0] * 99, "x" * 10**6, "", "length", reward=9.0)
    write_rollouts(path, [rollout])
    page = write_report(run_dir).read_text()
    steps = [int(step) for step in re.findall(r"<summary>Step (\d+)", page)]
    assert (len(steps), steps[0], steps[-1]) == (PAGE_STEPS, 0, PAGE_STEPS + 4)
    assert f"[... {10**6 - PAGE_CHARACTERS} characters ...]" in page
    assert len(page) < 10**6
