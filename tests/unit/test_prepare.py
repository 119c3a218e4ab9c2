"""What `prepare` says about the data of a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrl.artifacts import PrepareResult, read_result
from specrl.config import ConfigError, RewardPart, parse_config
from specrl.context import StageContext
from specrl.events import read_events
from specrl.progress import read_progress
from specrl.stages import prepare

SETTINGS: dict[str, Any] = {
    "model": {"source": "tiny", "max_length": 192},
    "sampling": {"max_response_tokens": 48},
    "validate": {"num_prompts": 3, "exactness_prompts": 2},
    "drafter": {"num_prompts": 4},
}


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    rows = [{"prompt": f"question {number} " + "x" * (500 * (number % 7 == 0)), "answer": 1} for number in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [rows[1], *rows]))
    data = {"source": "file", "path": str(path), "reward": "exact_match"}
    config = parse_config({"name": "test", "runs_dir": str(tmp_path), "data": data, **SETTINGS})
    return StageContext(config, "prepare", "prepare-0", tmp_path / "prepare-0", inputs={}, mlflow_run_id="")


def test_prepare_says_what_it_does_and_what_is_odd_about_the_data(context: StageContext) -> None:
    prepare.main(context)
    progress = read_progress(context.stage_dir)
    assert progress is not None and progress.message == "writing of the base model"
    result = read_result(context.stage_dir, PrepareResult)
    assert (result.prompts_seen, result.prompts_overlong) == (41, 6)
    repeated, overlong = read_events(context.stage_dir)
    assert (repeated.kind, overlong.kind) == ("data", "data")
    assert repeated.text.endswith("rows.jsonl: training rows that repeat an earlier prompt: 1")
    assert overlong.text.startswith("6 of the 41 prompts looked at have more than 144 tokens")


def test_prepare_says_how_many_references_do_not_earn_1_themselves(
    context: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def strict(prompt, response, answer): return float('question 3 ' not in prompt)"
    (tmp_path / "strict_rewards.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = context.config.data.model_copy(update={"reward": (RewardPart(name="strict_rewards:strict"),)})
    prepare.main(replace(context, config=context.config.model_copy(update={"data": data})))
    [line] = [event.text for event in read_events(context.stage_dir) if "references" in event.text]
    assert re.match(r"1 of the \d+ references looked at do not earn 1 by data.reward = 'strict_rewards:strict'", line)


def test_a_row_that_no_prompt_can_be_made_of_ends_the_run_in_prepare(context: StageContext) -> None:
    assert context.config.data.path is not None
    with context.config.data.path[0].open("a") as file:
        file.write('{"prompt": "half \\ud800 of a pair", "answer": 1}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 42: U\+D800 is half of a surrogate pair"):
        prepare.main(context)
