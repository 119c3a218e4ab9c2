"""Problems that take long to draw are drawn once in a run, and ahead of the step that asks for them."""

from __future__ import annotations

import json
import logging
import math
import time
import tomllib
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from specrl.config import Config, GeneratorConfig, parse_config
from specrl.data import store
from specrl.data.drawing_ahead import STEPS_AHEAD, DrawingAhead
from specrl.data.generators import GeneratorMixture, make_generator
from specrl.data.problems import Problem, Prompt
from specrl.data.prompts import PromptSource
from specrl.models.tiny import character_tokenizer

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
    assert files_of(config) == [f"{stream}.json" for stream in streams]
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
    [path] = config.problems_dir.glob("*/held-out.json")
    return store._read(path)


@pytest.mark.usefixtures("keeps_all")
def test_problems_are_kept_for_what_decides_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    others = [
        config_of(tmp_path, seed=config.seed + 1),
        config_of(tmp_path, data={"generators": [QUICK], "template": "Q: {prompt}"}),
        config_of(tmp_path, data={"generators": [QUICK], "max_prompt_tokens": 3000}),
    ]
    for chosen in (config, *others):
        assert source_of(chosen).batch(0) == PromptSource(chosen, TOKENIZER).batch(0)
    templated, other_end = character_tokenizer(512), character_tokenizer(512)
    templated.chat_template = "{{ messages[0].content }}"
    other_end.bos_token = other_end.eos_token
    for tokenizer in (templated, other_end):
        source_of(config, tokenizer).batch(0)
    monkeypatch.setattr(store, "_code", lambda: "of another commit")
    source_of(config).batch(0)
    assert len(files_of(config)) == 7
    TOKENIZER("a text", truncation=True, max_length=3)  # changes the tokenizer's state, and no prompt
    source_of(config).batch(0)
    source_of(config_of(tmp_path, data={"generators": [QUICK], "reward_workers": 1})).batch(0)
    assert len(files_of(config)) == 7


@pytest.mark.usefixtures("keeps_all")
def test_problems_are_kept_for_the_chat_that_decides_whether_they_fit(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = "{{ enable_thinking }}{% for message in messages %}{{ message.content }}{% endfor %}"
    chats: list[dict[str, Any]] = [
        {},
        {"system_prompt": "Be brief."},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ]
    for chat in chats:
        config = config_of(tmp_path, data={"generators": [QUICK], "template": "chat", **chat})
        assert source_of(config, tokenizer).batch(0) == PromptSource(config, tokenizer).batch(0)
    assert len(files_of(config_of(tmp_path))) == len(chats)


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
@pytest.mark.parametrize("damage", ["cut short", "one letter", "empty"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    config = config_of(tmp_path)
    drawn = source_of(config).batch(0)
    [path] = config.problems_dir.glob("*/train-000000.json")
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut short": whole[:middle],
        "one letter": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert source_of(config).batch(0) == drawn
    assert "is damaged" in caplog.text and path.read_bytes() == whole


def test_entries_are_kept_as_they_are_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = {
        "metadata": {
            "points": ("-3", ["5", (1, 2.5)]),
            "solved": None,
            "share": Fraction(2, 7),
            "by number": {1: (2,)},
        },
        "answer": "half of a pair: \ud800",
    }
    problem, path = Problem("question", "answer", "demonstration", entry, 2), tmp_path / "problems.json"
    assert store._write(path, [problem]) and store._read(path) == [problem]
    with caplog.at_level(logging.WARNING):
        for other in ({"object": Path()}, {"set": {1}}, {"missing": math.nan}):
            assert not store._write(tmp_path / "others.json", [Problem("question", "answer", "demonstration", other)])
    assert caplog.text.count("cannot be written") == 3 and not (tmp_path / "others.json").exists()


@pytest.mark.usefixtures("keeps_all")
def test_what_cannot_be_written_is_drawn_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path)
    config.run_dir.mkdir(parents=True)
    config.problems_dir.write_text("a file, where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert source_of(config).held_out(4) == PromptSource(config, TOKENIZER).held_out(4)
    assert "cannot be written" in caplog.text


@pytest.mark.usefixtures("keeps_all")
def test_a_source_that_draws_anew_counts_all_of_it(tmp_path: Path) -> None:
    sets = {"hard": {"generators": [{"name": "countdown"}], "num_prompts": 4}}
    config = config_of(tmp_path, validate={"num_prompts": 6, "sets": sets}, drafter={"num_prompts": 4})
    for _ in range(2):
        source = PromptSource(config, TOKENIZER, problems_dir=config.problems_dir, draws_anew=True)
        assert source.check() == PromptSource(config, TOKENIZER).check()
    assert source_of(config).check().seen == 0


def test_another_process_draws_the_next_steps(tmp_path: Path, no_drawing: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, SLOW, train={"prompts_per_step": 6, "num_steps": 9})
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    ahead = DrawingAhead(config, (0, 0), tmp_path / "tokenizer")
    try:
        source = PromptSource(config, TOKENIZER, problems_dir=config.problems_dir, on_slow=ahead.reach)
        source.batch(0)
        wanted = [f"train-{step:06d}.json" for step in range(STEPS_AHEAD + 1)]
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


def test_the_problems_of_the_shipped_configurations_can_be_kept(tmp_path: Path) -> None:
    """Some of `gsm_symbolic` have fractions in their entries; were these lost, no problem of the file would be kept."""
    paths = (Path(__file__).parents[2] / "configs").glob("*.toml")
    files = [tomllib.loads(path.read_text()) for path in paths]
    generators = {json.dumps(generator): generator for file in files for generator in file["data"]["generators"]}
    assert len(generators) > 5
    for number, generator in enumerate(generators.values()):
        count = 2 if generator["name"] == SLOW["name"] else 100
        drawn = list(islice(make_generator(GeneratorConfig.model_validate(generator)).problems(seed=1), count))
        path = tmp_path / f"{number}.json"
        assert store._write(path, drawn) and store._read(path) == drawn, generator["name"]
