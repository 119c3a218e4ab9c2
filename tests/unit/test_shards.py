"""Generated problems are drawn in shards, each a pure function of the configuration, its stream and its number."""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slurm.environment import ROOT, job_environment
from specrl.config import Config, parse_config
from specrl.data import drawing
from specrl.data.drawing import FIRST_STEPS, draw_first, drawn_ahead
from specrl.data.generators import plain
from specrl.data.problems import Counts, Problem, Prompt
from specrl.data.prompts import PromptSource, Shard
from specrl.data.shards import HELD_OUT_SHARD, SHARD, GeneratorMixture, read_shard, write_shard
from specrl.models.tiny import character_tokenizer

TOKENIZER = character_tokenizer(512)
QUICK = {"name": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 3}}
HARD = {"hard": {"generators": [{"name": "countdown"}], "num_prompts": 4}}
DRAW = """
from itertools import islice
from specrl.config import GeneratorConfig
from specrl.data.generators import make_generator
for name in ("isomorphic_strings", "list_functions"):
    print([problem.question for problem in islice(make_generator(GeneratorConfig(name=name)).problems(0), 100)])
"""


def config_of(tmp_path: Path, generator: dict[str, Any] = QUICK, **sections: Any) -> Config:
    values = {"name": "run", "runs_dir": tmp_path, "data": {"generators": [generator]}, "model": {"max_length": 8192}}
    return parse_config(values | sections)


def source_of(config: Config, tokenizer: Any = TOKENIZER) -> PromptSource:
    return PromptSource(config, tokenizer, prompts_dir=config.run_dir / "prompts")


def files_of(config: Config) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((config.run_dir / "prompts").glob("*/*"))}


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(*_: Any) -> Iterator[Problem]:
        raise AssertionError("a problem is drawn")

    monkeypatch.setattr(GeneratorMixture, "_candidates", candidates)


def everything(source: PromptSource) -> list[list[Prompt]]:
    return [source.batch(0), source.batch(7), source.held_out(20), source.pretraining(5), source.validation("hard")]


def test_kept_problems_are_those_that_would_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, validate={"sets": HARD}, train={"prompts_per_step": 10})
    drawn = everything(PromptSource(config, TOKENIZER))
    assert everything(source_of(config)) == drawn
    streams = ["held-out-000000", "held-out-000000", "held-out-000001", "pretraining-000000"]
    streams += ["train-000000", "train-000001"]  # step 7 has problems 70 to 80
    assert sorted(path.stem for path in (config.run_dir / "prompts").glob("*/*")) == streams
    forbid(monkeypatch)
    assert everything(source_of(config)) == drawn
    assert source_of(config).held_out(3) == drawn[2][:3]


def test_a_refill_equals_the_original(tmp_path: Path) -> None:
    config = config_of(tmp_path, train={"prompts_per_step": 50})
    batches = [source_of(config).batch(step) for step in range(6)]
    files = files_of(config)
    assert len(files) == 5
    shutil.rmtree(config.run_dir)
    source = source_of(config)
    assert [source.batch(step) for step in reversed(range(6))] == batches[::-1]
    assert files_of(config) == files


def test_problems_are_a_function_of_their_index_whatever_a_step_asks_for(tmp_path: Path) -> None:
    few, many = (source_of(config_of(tmp_path, train={"prompts_per_step": count})) for count in (6, 12))
    texts = [
        [prompt.text for step in steps for prompt in source.batch(step)]
        for source, steps in ((few, range(40)), (many, range(20)))
    ]
    assert texts[0] == texts[1] and len(files_of(config_of(tmp_path))) == 4
    later = PromptSource(config_of(tmp_path, train={"prompts_per_step": 12}), TOKENIZER, begun=(30, 180))
    assert [prompt.text for step in range(30, 35) for prompt in later.batch(step)] == texts[0][180:]


def test_shards_are_those_of_what_decides_them(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    others = [
        config_of(tmp_path, seed=config.seed + 1),
        config_of(tmp_path, data={"generators": [QUICK], "template": "Q: {prompt}"}),
        config_of(tmp_path, data={"generators": [QUICK], "max_prompt_tokens": 3000}),
        config_of(tmp_path, sampling={"max_response_tokens": 100}),
    ]
    folder = config.run_dir / "prompts"
    for count, chosen in enumerate((config, *others), 1):
        assert source_of(chosen).batch(0) == PromptSource(chosen, TOKENIZER).batch(0)
        assert len([*folder.iterdir()]) == count
    source_of(config_of(tmp_path, data={"generators": [QUICK], "reward_workers": 1})).batch(0)
    assert len([*folder.iterdir()]) == 5


def test_a_chat_decides_what_fits(tmp_path: Path) -> None:
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
    assert len([*(config.run_dir / "prompts").iterdir()]) == len(chats)


def test_problems_of_files_are_not_kept(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "question {row}", "answer": "1"}}\n' for row in range(90)))
    config = config_of(tmp_path, data={"source": "file", "path": rows, "reward": "exact_match"})
    source = source_of(config)
    source.batch(0)
    assert not files_of(config) and not [*source.shards(range(9), others=True)]


@pytest.mark.parametrize("damage", ["cut short", "empty", "no Arrow"])
def test_a_damaged_shard_is_drawn_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    config = config_of(tmp_path)
    drawn = source_of(config).batch(0)
    [path] = (config.run_dir / "prompts").glob("*/train-000000.arrow")
    whole = path.read_bytes()
    path.write_bytes({"cut short": whole[: len(whole) // 2], "empty": b"", "no Arrow": b"x" * len(whole)}[damage])
    with caplog.at_level(logging.WARNING):
        assert source_of(config).batch(0) == drawn
    assert "cannot be read" in caplog.text and path.read_bytes() == whole


def test_what_cannot_be_written_is_drawn_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "prompts").write_text("a file, where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert source_of(config).held_out(4) == PromptSource(config, TOKENIZER).held_out(4)
    assert "cannot be written" in caplog.text


def test_what_is_read_is_counted_as_it_was_when_it_was_drawn(tmp_path: Path) -> None:
    config = config_of(tmp_path, validate={"num_prompts": 6, "sets": HARD}, drafter={"num_prompts": 4})
    first, again = source_of(config).check(), source_of(config).check()
    assert first == again and first.seen > SHARD + HELD_OUT_SHARD


def test_entries_are_kept_as_they_are(tmp_path: Path) -> None:
    given = {
        "points": ("-3", ["5", (1, 2.5)], math.inf),
        "solved": None,
        "right": True,
        "by number": {1: (2,)},
        "of NumPy": [np.str_("text"), np.float64(0.5), np.int64(7)],
        "share": Fraction(2, 7),
        "answer": "half of a pair: \ud800",
    }
    entry = plain(given)
    problem, path = Problem("question", "answer", "demonstration", entry, 2), tmp_path / "shard.arrow"
    write_shard(path, [problem], Counts(3, 1, 0, 9))
    assert read_shard(path) == ([problem], Counts(3, 1, 0, 9))
    assert entry == {**given, "points": ("-3", ["5", (1, 2.5)], "inf"), "share": "2/7"}
    assert pa.ipc.open_file(path).read_all()["question"].to_pylist() == ["question"]


def test_the_processes_of_jobs_draw_the_same_problems() -> None:
    """Mutation: without PYTHONHASHSEED in `job_environment`, or without seeding Python's global generator.

    Of these generators, one chooses letters from sets, and the other one draws from the global generator.
    """
    environment = {**os.environ, **job_environment(ROOT)}
    command = [sys.executable, "-c", DRAW]
    drawn = {subprocess.run(command, env=environment, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(drawn) == 1 and b"isomorphic" in drawn.pop()


def test_all_processes_take_the_problems_of_the_one_that_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = [Problem(f"first {n}", "1", "1") for n in range(SHARD)], [Problem("later", "2", "2")]
    draw = GeneratorMixture._candidates

    def candidates(mixture: GeneratorMixture, stream: str, number: int) -> Iterator[Problem]:
        write_shard(mixture._path(stream, number), first, Counts())  # another process does, meanwhile
        return draw(mixture, stream, number)

    monkeypatch.setattr(GeneratorMixture, "_candidates", candidates)
    config = config_of(tmp_path)
    assert [prompt.text for prompt in source_of(config).batch(0)] == [f"first {n}" for n in range(16)]
    [path] = (config.run_dir / "prompts").glob("*/*")
    write_shard(path, later, Counts())
    assert read_shard(path) == (first, Counts()) and [*path.parent.iterdir()] == [path]


def has(shard: Shard) -> bool:
    mixture, stream, number = shard
    return mixture.has(stream, number)


class Slow(GeneratorMixture):
    """Each problem takes its time."""

    drawn = 0

    def _candidates(self, stream: str, number: int) -> Iterator[Problem]:
        for problem in super()._candidates(stream, number):
            Slow.drawn += 1
            time.sleep(0.01)
            yield problem


def test_before_the_first_step_only_what_it_needs_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrl.data.held_out.GeneratorMixture", Slow)
    monkeypatch.setattr(drawing, "QUICK_S", 0.5)
    started: list[Any] = []
    monkeypatch.setattr(drawing, "_start", lambda *arguments, **_: started.append(arguments) or [])
    config = config_of(
        tmp_path,
        train={"num_steps": 10_000, "prompts_per_step": 40},
        validate={"num_prompts": HELD_OUT_SHARD, "exactness_prompts": 4},
        drafter={"num_prompts": 10},
    )
    source = source_of(config)
    draw_first(source, config, tmp_path, (0, 1))
    needed = [*source.shards(range(FIRST_STEPS), others=True)]
    assert [shard[1:] for shard in needed] == [("pretraining", 0), ("held-out", 0), ("train", 0), ("train", 1)]
    assert len(started) == 1 and Slow.drawn < 2 * HELD_OUT_SHARD * 20  # of hundreds of thousands
    for mixture, stream, number in needed:  # what the processes do
        mixture.keep(stream, number)
    drawn = Slow.drawn
    source.check()
    for step in range(FIRST_STEPS):
        source.batch(step)
    assert Slow.drawn == drawn


def test_all_problems_of_a_quick_generator_are_there_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, train={"num_steps": 20, "prompts_per_step": 16}, validate={"sets": HARD})
    monkeypatch.setattr(drawing, "start_helper", lambda *_: pytest.fail("a process is started"))
    monkeypatch.setattr(drawing, "QUICK_S", 120.0)
    source = source_of(config)
    for rank in range(2):
        draw_first(source, config, tmp_path, (rank, 2))
    assert all(map(has, source.shards(range(21), others=True)))
    forbid(monkeypatch)
    with drawn_ahead(source, config, tmp_path, 0):
        everything(source_of(config))


def test_processes_draw_what_the_first_step_needs_and_then_the_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, train={"prompts_per_step": 40, "num_steps": 9}, drafter={"num_prompts": 4})
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    drawn = [PromptSource(config, TOKENIZER).batch(step) for step in range(10)]
    source = source_of(config)
    monkeypatch.setattr(drawing, "QUICK_S", -1.0)
    draw_first(source, config, tmp_path / "tokenizer", (0, 1))
    assert all(map(has, source.shards(range(FIRST_STEPS), others=True)))
    missing = [shard for shard in source.shards(range(10)) if not has(shard)]
    assert [shard[1:] for shard in missing] == [("train", number) for number in range(2, 7)]
    start = drawing._start  # a busy machine leaves nothing to low priority
    monkeypatch.setattr(drawing, "_start", lambda *arguments, needed: start(*arguments, needed=True))
    with drawn_ahead(source, config, tmp_path / "tokenizer", 3):
        deadline = time.monotonic() + 300
        while not all(map(has, missing)) and time.monotonic() < deadline:
            time.sleep(0.1)
    forbid(monkeypatch)
    assert [source.batch(step) for step in range(10)] == drawn
