"""Problems that take long to draw are drawn once in a run, and ahead of the step that asks for them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrl.config import Config, parse_config
from specrl.data import store
from specrl.data.generators import GeneratorMixture
from specrl.data.problems import Problem, Prompt
from specrl.data.prompts import PromptSource
from specrl.models.tiny import character_tokenizer
from specrl.rollout.drawing_ahead import STEPS_AHEAD, DrawingAhead

TOKENIZER = character_tokenizer(512)
QUICK = {"name": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 3}}
SLOW = {"name": "zebra_puzzles", "parameters": {"num_people": 5, "num_characteristics": 5}}
"""A generator that takes the better part of a second for a problem."""


def config_of(tmp_path: Path, generator: dict[str, Any] = QUICK, **sections: Any) -> Config:
    values = {"name": "run", "runs_dir": tmp_path, "data": {"generators": [generator]}, "model": {"max_length": 8192}}
    return parse_config(values | sections)


def source_of(config: Config, tokenizer: Any = TOKENIZER) -> PromptSource:
    return PromptSource(config, tokenizer, problems_dir=config.problems_dir)


def files_of(config: Config) -> list[str]:
    return sorted(path.name for path in config.problems_dir.glob("*/*"))


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn counts as slow."""
    monkeypatch.setattr(store, "SLOW_S", 0.0)


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing more can be drawn once the test calls `setattr` of what it gets."""
    with monkeypatch.context() as context:
        yield context


def forbid(context: pytest.MonkeyPatch) -> None:
    def candidates(*_: Any) -> Iterator[Problem]:
        raise AssertionError("a problem is drawn")

    context.setattr(GeneratorMixture, "_candidates", candidates)


def everything(source: PromptSource) -> list[list[Prompt]]:
    return [source.batch(0), source.batch(1), source.held_out(6), source.pretraining(5), source.validation("hard")]


@pytest.mark.usefixtures("keeps_all")
def test_kept_problems_are_those_that_would_be_drawn(tmp_path: Path, no_drawing: pytest.MonkeyPatch) -> None:
    sets = {"hard": {"generators": [{"name": "countdown"}], "num_prompts": 4}}
    config = config_of(tmp_path, validate={"sets": sets})
    drawn = everything(PromptSource(config, TOKENIZER))
    assert everything(source_of(config)) == drawn
    streams = ["held-out", "held-out", "pretraining", "train-000000", "train-000001"]
    assert files_of(config) == [f"{stream}.arrow" for stream in streams]
    forbid(no_drawing)
    assert everything(source_of(config)) == drawn
    assert source_of(config).held_out(3) == drawn[2][:3]


@pytest.mark.usefixtures("keeps_all")
def test_more_problems_than_are_kept_are_drawn_and_kept(tmp_path: Path, no_drawing: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    source_of(config).held_out(3)
    more = source_of(config).held_out(6)
    forbid(no_drawing)
    assert source_of(config).held_out(6) == more == PromptSource(config, TOKENIZER)._prompts("held-out", kept(config))


def kept(config: Config) -> list[Problem]:
    [path] = config.problems_dir.glob("*/held-out.arrow")
    return store._read(path)


@pytest.mark.usefixtures("keeps_all")
def test_another_seed_template_or_tokenizer_has_problems_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    others = [
        config_of(tmp_path, seed=config.seed + 1),
        config_of(tmp_path, data={"generators": [QUICK], "template": "Q: {prompt}"}),
        config_of(tmp_path, data={"generators": [QUICK], "max_prompt_tokens": 3000}),
    ]
    for chosen in (config, *others):
        assert source_of(chosen).batch(0) == PromptSource(chosen, TOKENIZER).batch(0)
    other = character_tokenizer(512)
    other.chat_template = "{{ messages[0].content }}"
    source_of(config, other).batch(0)
    assert len(files_of(config)) == 5
    TOKENIZER("a text", truncation=True, max_length=3)  # changes the tokenizer's state, and no prompt
    source_of(config).batch(0)
    assert len(files_of(config)) == 5


def test_quick_problems_and_those_of_files_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SLOW_S", math.inf)
    config = config_of(tmp_path)
    source_of(config).batch(0)
    monkeypatch.setattr(store, "SLOW_S", 0.0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "question {row}", "answer": "1"}}\n' for row in range(90)))
    data = {"source": "file", "path": rows, "reward": "exact_match"}
    source_of(config_of(tmp_path, data=data)).batch(0)
    assert not files_of(config)


@pytest.mark.usefixtures("keeps_all")
def test_a_damaged_file_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path)
    drawn = source_of(config).batch(0)
    [path] = config.problems_dir.glob("*/train-000000.arrow")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        assert source_of(config).batch(0) == drawn
    assert "cannot be read" in caplog.text and path.read_bytes() == whole


@pytest.mark.usefixtures("keeps_all")
def test_what_cannot_be_written_is_drawn_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path)
    config.run_dir.mkdir(parents=True)
    config.problems_dir.write_text("a file, where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert source_of(config).held_out(4) == PromptSource(config, TOKENIZER).held_out(4)
    assert "cannot be written" in caplog.text


@pytest.mark.usefixtures("keeps_all")
def test_the_report_on_prompts_does_not_depend_on_what_is_kept(tmp_path: Path) -> None:
    config = config_of(tmp_path, validate={"num_prompts": 6}, drafter={"num_prompts": 4}, train={"prompts_per_step": 3})
    first = source_of(config).check()
    assert first.seen > 6 + 4 and source_of(config).check().seen == first.seen - 3, "the first step's are read"


def test_another_process_draws_the_next_steps(tmp_path: Path, no_drawing: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, SLOW, train={"prompts_per_step": 2, "num_steps": 9})
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    ahead = DrawingAhead(config, (0, 0), tmp_path / "tokenizer")
    try:
        source = PromptSource(config, TOKENIZER, problems_dir=config.problems_dir, on_slow=ahead.reach)
        source.batch(0)
        wanted = [f"train-{step:06d}.arrow" for step in range(STEPS_AHEAD + 1)]
        deadline = time.monotonic() + 120
        while files_of(config) != wanted and time.monotonic() < deadline:
            time.sleep(0.2)
        assert files_of(config) == wanted
        drawn = PromptSource(config, TOKENIZER).batch(1)
        forbid(no_drawing)
        assert source.batch(1) == drawn
    finally:
        ahead.close()
    assert ahead._process is not None and ahead._process.returncode is not None


def test_a_rank_goes_on_without_the_process_that_draws_ahead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ahead = DrawingAhead(config_of(tmp_path), (0, 0), tmp_path / "no such folder")
    ahead.reach(0)
    assert ahead._process is not None
    ahead._process.wait(timeout=120)  # there is no tokenizer
    with caplog.at_level(logging.WARNING):
        ahead.reach(1)
        ahead.reach(2)
    assert caplog.text.count("has ended") == 1
    ahead.close()
