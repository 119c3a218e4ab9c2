"""The figures and the page of `specrl bench bubbles`, from made-up runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from specrl.artifacts import PretrainResult, read_result, write_result
from specrl.bench.bubbles import main as bubbles
from specrl.bench.bubbles.page import stored_kind, write_page
from specrl.bench.bubbles.runs import BUBBLE_SETTINGS, SettingRun, acceptance, make_config, row, with_drafter
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page
from specrl.bench.settings import BubbleSettings
from specrl.config import ConfigError, parse_config
from specrl.context import StageContext
from specrl.report.gantt import gantt
from specrl.report.plots import dot_chart, line_chart
from specrl.rollout.drafts.acceptance import SourceCounts
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.step_record import StepRecord, write_step
from specrl.timeline import Bubble, RankTimeline, rank_spans

LENGTHS = ((6, 9), (3, 5))
"""Tokens of each rank's responses."""


def make_rollout(step: int, rank: int, sample: int, length: int, stored: int = 0, own: int = 0) -> Rollout:
    rollout = Rollout(step, rank, rank, sample, step, step, 1, [1, 2], [3] * length, [0.0] * length, "", "", "stop")
    rollout.num_stored, rollout.own_stored_tokens, rollout.num_accepted_tokens = stored, own, own // 2
    return rollout


def make_record(step: int, *, probe: float, replay: SourceCounts | None, stretch: int = 1) -> StepRecord:
    """`stretch`: how many times as many tokens, decoding steps and seconds there were."""
    ranks = []
    for rank, lengths in enumerate(LENGTHS):
        tokens = stretch * sum(lengths)
        pace = [(2, stretch * min(lengths), 0.1 * stretch), (1, stretch * (max(lengths) - min(lengths)), 0.1 * stretch)]
        bubble = Bubble(rank, 100.0, 100.0 + stretch * (2.0 - rank), 102.0, tokens, 0.1, pace=pace)
        ranks.append(RankTimeline(bubble, rank_spans(bubble, [])))
    metrics = {
        "timing/step_s": 4.0 * stretch,
        "timing/generation_s": 2.0 * stretch,
        "spec/decode_steps": 8.0 * stretch,
        "refit/probe_acceptance_length": probe,
        "policy/grad_norm": 0.1 * (step + 1),
        "bubble/idle_s": 1.0,
    }
    by_source = {"drafter": SourceCounts(10, 30, 10)} | ({"replay": replay} if replay is not None else {})
    return StepRecord(step, metrics, 0, [], [], by_source, ranks)


def make_outcome(folder: Path, name: str, stretch: int = 1) -> SettingRun:
    replays = "replay" in BUBBLE_SETTINGS[name].method
    records = []
    for step in range(4):
        replay = SourceCounts(4, 40, 8 * step) if replays and step else None
        records.append(make_record(step, probe=2.0 + step, replay=replay, stretch=stretch))
        write_step(folder / name / "steps", records[-1])
        for rank, lengths in enumerate(LENGTHS):
            own = [length if replays and step else 0 for length in lengths]
            rows = [make_rollout(step, rank, i, length, 2, own[i]) for i, length in enumerate(lengths)]
            write_rollouts(rollout_path(folder / name / "rollouts", step, rank), rows)
    return SettingRun(name, records, folder / name / "steps", folder / name / "rollouts", 8)


def test_ratios_are_per_token_and_the_drafter_is_judged_by_its_probe(tmp_path: Path) -> None:
    plain = make_outcome(tmp_path, "plain")
    found = row(make_outcome(tmp_path, "both", stretch=2), plain)  # twice the tokens in twice the steps and seconds
    assert (found["throughput_ratio"], found["decode_step_ratio"], found["step_time_ratio"]) == (1.0, 1.0, 1.0)
    assert (found["acceptance_length_first"], found["acceptance_length_last"]) == (3.0, 4.0)
    assert acceptance(make_outcome(tmp_path, "pregenerate")) == [(1, 3.0), (2, 5.0), (3, 7.0)]


def test_the_page_has_every_table_and_pictures_that_are_xml(tmp_path: Path) -> None:
    outcomes = {name: make_outcome(tmp_path, name) for name in BUBBLE_SETTINGS}
    rows = [row(outcome, outcomes["plain"]) for name, outcome in outcomes.items() if name != "plain"]
    job = BenchJob("m:f", tmp_path, {}, "specrl bench bubbles", tmp_path / "page.md", tmp_path / "rows.json")
    write_page(job, BubbleSettings(num_steps=4), rows, outcomes)
    page = job.page.read_text()
    assert "| both | own | 12 | 57 | 0.47 |" in page  # three steps of stored text, of which half was accepted
    assert "| both | 2 or 3 | 4 | 19 | 1.00 |" in page
    assert "| 128 | train_drafter |" in page
    pictures = sorted(tmp_path.glob("page-*.svg"))
    assert {picture.stem for picture in pictures} >= {"page-update", "page-gantt-both", "page-drafter-none"}
    for picture in pictures:
        ElementTree.fromstring(picture.read_text())


def test_the_page_of_some_uses_shows_these(tmp_path: Path) -> None:
    outcomes = {name: make_outcome(tmp_path, name) for name in ("plain", "train_drafter")}
    rows = [row(outcomes["train_drafter"], outcomes["plain"])]
    job = BenchJob("m:f", tmp_path, {}, "specrl bench bubbles", tmp_path / "page.md", tmp_path / "rows.json")
    write_page(job, BubbleSettings(num_steps=4, uses=("train_drafter",)), rows, outcomes)
    page = job.page.read_text()
    assert "train_drafter" in page and "both" not in page.split("Ratios are against")[0]
    assert {path.stem for path in tmp_path.glob("page-*.svg")} == {"page-drafter-train_drafter"}


def test_the_same_seeds_are_compared_with_other_ones_in_one_call(tmp_path: Path) -> None:
    config = parse_config({"name": "run"})
    settings = BubbleSettings(uses=("both", "both_other", "pregenerate_other"))
    found = {name: make_config(config, tmp_path / name, name, settings) for name in ("plain", *settings.uses)}
    assert {name: (made.speculation.method, made.bubbles.use, made.bubbles.seeds) for name, made in found.items()} == {
        "plain": ("none", "none", "same"),
        "both": ("eagle3+replay", "both", "same"),
        "both_other": ("eagle3+replay", "both", "other"),
        "pregenerate_other": ("replay", "pregenerate", "other"),
    }
    outcomes = {name: make_outcome(tmp_path, name) for name in found}
    rows = [row(outcomes[name], outcomes["plain"]) for name in settings.uses]
    job = BenchJob("m:f", tmp_path, {}, "specrl bench bubbles", tmp_path / "page.md", tmp_path / "rows.json")
    write_page(job, settings, rows, outcomes)
    page = job.page.read_text()
    assert "text: the rollouts' own, in both_other and pregenerate_other other ones than the rollouts'." in page
    assert "| both_other | own | 12 |" in page


def test_another_drafter_takes_the_place_of_the_runs_own(tmp_path: Path) -> None:
    result = PretrainResult(
        drafter_dir=tmp_path / "own", rollouts_dir=tmp_path / "r", num_responses=3, reward_mean=0.5, seconds=1.0
    )
    write_result(tmp_path / "pretrain", result)
    with pytest.raises(ConfigError, match="other: no drafter there"):
        with_drafter(tmp_path / "pretrain", tmp_path / "other", tmp_path / "bench")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    found = read_result(with_drafter(tmp_path / "pretrain", tmp_path / "other", tmp_path / "bench"), PretrainResult)
    assert found == result.model_copy(update={"drafter_dir": tmp_path / "other"})


@pytest.mark.parametrize(
    ("num_stored", "own", "kind"),
    [(0, 0, "0"), (1, 0, "1"), (3, 0, "2 or 3"), (9, 0, "4 or more"), (4, 5, "own"), (1, 4, "own, shorter")],
)
def test_responses_are_told_apart_by_what_was_stored(num_stored: int, own: int, kind: str) -> None:
    assert stored_kind(make_rollout(0, 0, 0, 5, num_stored, own)) == kind


def test_every_kind_of_picture_is_xml_with_one_name_space(tmp_path: Path) -> None:
    page = Page(tmp_path / "page.md")
    record = make_record(0, probe=1.0, replay=None)
    charts = {"gantt": gantt(record.ranks), "line": line_chart([0, 1], [1, 2], "a < b", "y")}
    for name, svg in {**charts, "dots": dot_chart([0.1], [2], "x", "y")}.items():
        page.plot(name, svg, name)
        assert ElementTree.fromstring(page.plots[f"page-{name}.svg"]).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_failure_late_keeps_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: StageContext, folder: Path, name: str, settings: BubbleSettings) -> SettingRun:
        if name == "both":
            raise RuntimeError("rank 1 failed")
        return make_outcome(tmp_path, name)

    contexts: list[str] = []

    def make_context(job: BenchJob, folder: Path, name: str, settings: BubbleSettings) -> SimpleNamespace:
        contexts.append(name)
        return SimpleNamespace(config=None)

    monkeypatch.setattr(bubbles, "make_context", make_context)
    monkeypatch.setattr(bubbles, "run_setting", run)
    entry = "specrl.bench.bubbles.main:main"
    job = BenchJob(entry, tmp_path, {}, "specrl bench bubbles", tmp_path / "page.md", tmp_path / "rows.json")
    with pytest.raises(RuntimeError):
        bubbles.main(job)
    assert contexts == ["plain", *BubbleSettings().uses]
    assert [found["use"] for found in read(tmp_path / "rows.json")] == ["none", "pregenerate", "train_drafter"]


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def test_a_rank_dies_with_whoever_started_it() -> None:
    rank = (
        "from specrl.processes import end_with_parent; import time; end_with_parent(PARENT); "
        "print(1, flush=True); time.sleep(600)"
    )
    parent = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {rank!r}.replace("PARENT", str(os.getpid()))], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Also false for one that is dead and that nobody has waited for."""
    status = Path(f"/proc/{process}/stat")
    try:
        os.kill(process, 0)
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
