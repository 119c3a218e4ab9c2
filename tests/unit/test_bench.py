"""The parts of `specrl bench` that need no engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from flows.cli import invoke
from specrl.artifacts import PrepareResult, PretrainResult, TrainResult, write_result, write_text
from specrl.bench.job import BenchJob, Subject
from specrl.bench.options import RolloutOptions
from specrl.bench.pages import Spread, hardware, order_of, ratios, table, write_results
from specrl.bench.rollouts import engines
from specrl.bench.rollouts.main import longest
from specrl.bench.rollouts.rounds import rounds_of
from specrl.config import Config, ConfigError, SpeculationConfig, dump_config, parse_config
from specrl.report.plots import gantt, line_chart
from specrl.rollout.requests import Request
from specrl.timeline import Bubble, RankTimeline, rank_spans


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A run that has finished training, as far as a command line looks."""
    config = Config(name="r", runs_dir=tmp_path)
    write_text(config.run_dir / "config.json", dump_config(config))
    pretrained = PretrainResult(drafter_dir=None, rollouts_dir=tmp_path, num_responses=1, reward_mean=0.0, seconds=1.0)
    trained = TrainResult(
        policy_dir=tmp_path,
        drafter_dir=tmp_path,
        policy_step=1,
        steps=1,
        step_seconds_median=1.0,
        timing_share={},
        reward_first=0.0,
        reward_last=0.0,
        mismatch={},
        seconds=1.0,
        acceptance_length=1.0,
        acceptance_rate_per_pos=[],
        refit_checks=1,
        refit_failures=0,
        refit_max_abs_logprob_diff=0.0,
    )
    prepared = PrepareResult(policy_dir=tmp_path, seconds=1.0)
    for stage, result in (("prepare", prepared), ("pretrain", pretrained), ("train", trained)):
        write_result(config.run_dir / "stages" / f"{stage}-0", result)
    return config.run_dir


OPTIONS = RolloutOptions(methods=(), ks=(1, "adaptive"), batches=(2,), repeats=1, max_tokens=8)


def test_ratios_are_taken_within_each_round() -> None:
    assert ratios([10, 30, 60], [10, 10, 30]) == Spread(2.0, 1.0, 3.0)


def test_every_side_runs_once_in_every_round_and_none_is_always_first() -> None:
    rounds = [order_of(3, number) for number in range(6)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert {order[0] for order in rounds[:3]} == {0, 1, 2} and rounds[3] == [2, 1, 0]


def test_a_batch_takes_requests_that_last_and_other_ones_in_each_round() -> None:
    requests = [Request([1], seed, 50, 1.0) for seed in range(64)]
    lengths = {seed: 50 if seed % 4 == 0 else 3 for seed in range(64)}
    one, large = (rounds_of(longest(requests, lengths, max(batch, 8), 20), batch, 3) for batch in (1, 32))
    lasting = list(range(0, 64, 4))
    assert [[request.seed for request in asked] for asked in one] == [lasting[:8], lasting[8:], lasting[:8]]
    assert {request.max_tokens for requests in one for request in requests} == {20}
    assert [len(requests) for requests in large] == [32] * 3
    assert len({request.seed for request in large[0]}) == 32


def test_tables_are_markdown_and_a_ratio_has_its_range() -> None:
    rows = [{"k": 3, "step_ratio": 1.5, "step_min": 1.0, "step_max": 2.0, "by": [0.5, 0.25], "none": None}]
    found = table(rows, {"k": "k", "step": "step", "by position": "by", "nothing": "none"})
    assert found == (
        "| k | step | by position | nothing |\n| --- | --- | --- | --- |\n"
        "| 3 | 1.50x (1.00 to 2.00) | 0.50 / 0.25 | - |"
    )


def test_a_page_has_command_and_machine_and_the_rows_lie_beside_it(tmp_path: Path) -> None:
    job = BenchJob("run", {}, "specrl bench run", tmp_path, tmp_path / "page.md")
    write_results(job, [{"k": 3}, {"k": "adaptive"}], "A title", ["one\n", "two"], "two cores")
    text = job.page.read_text()
    assert text.startswith("# A title\n\nCommand: `specrl bench run`. Date: 2") and text.endswith("\n\none\n\ntwo\n")
    assert "Hardware: two cores." in text
    assert json.loads((tmp_path / "page.json").read_text()) == [{"k": 3}, {"k": "adaptive"}]


def test_a_package_whose_metadata_are_no_text_is_left_out_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("importlib_metadata")  # once imported it answers instead of Python's own, and raises earlier
    for place, metadata in {
        "first/broken-1": b"\xff\xfe\0",
        "first/triton-1": b"Metadata-Version: 2.1\nName: triton\nVersion: 1.5\n",
        "second/triton-2": b"Metadata-Version: 2.1\nName: triton\nVersion: 2.5\n",
    }.items():
        folder = tmp_path / f"{place}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_bytes(metadata)
    for place in ("second", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert "triton 1.5" in hardware()  # of two, Python imports the first


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = BenchJob("run", {"ks": [1, "adaptive"]}, "specrl", tmp_path, tmp_path / "p.md", tmp_path, ("seed=1",))
    job.save(tmp_path / "job.json")
    assert BenchJob.load(tmp_path / "job.json") == job


def test_methods_are_those_that_the_drafter_of_the_run_allows() -> None:
    eagle = parse_config({"name": "run", "speculation": {"method": "eagle3"}})
    ngram = parse_config({"name": "run", "speculation": {"method": "ngram"}})
    assert OPTIONS.methods_of(eagle) == ("eagle3", "eagle3+replay", "ngram", "ngram+replay", "replay")
    assert OPTIONS.methods_of(ngram) == ("ngram", "ngram+replay", "replay")
    with pytest.raises(ConfigError, match="--methods eagle3: this run has no drafter for it"):
        RolloutOptions(("eagle3",), (1,), (1,), 1, 1).methods_of(ngram)


def test_engines_that_live_at_once_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def start(*_: object, gpu_share: float) -> SimpleNamespace:
        shares.append(gpu_share)
        return SimpleNamespace(replays=False)

    monkeypatch.setattr(engines, "start_engine", start)
    config = Config(name="shared", speculation=SpeculationConfig(method="eagle3"))
    options = RolloutOptions(("ngram", "eagle3"), (3,), (2,), 1, 8)
    started = engines.Engines(Subject(config, tmp_path, tmp_path, tmp_path, {}), options)
    started.add_methods([])
    stock = started._config("none").engine.gpu_memory_fraction
    assert len(shares) == 3
    assert sum(shares) + stock <= 0.85


def test_only_its_own_method_takes_the_draft_model_of_the_run(tmp_path: Path) -> None:
    run = SpeculationConfig(method="draft_model", draft_model=tmp_path)
    assert engines.speculation_of(run, "draft_model", 5) == run.model_copy(update={"k": 5})
    assert all(engines.speculation_of(run, method, 3).draft_model is None for method in ("ngram", "replay", "eagle3"))
    assert engines.speculation_of(run, "none", 0).draft_model is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollouts", "--ks", "1,x"], "--ks 1,x: 'x' is not allowed; allowed: positive numbers or adaptive"),
        (["rollouts", "--batches", "0"], "'0' is not allowed; allowed: positive numbers, separated by commas"),
        (["rollouts", "--methods", "none"], "--methods none: allowed: eagle3"),
        (["rollouts", "--ks", ","], "--ks ,: '' is not allowed"),
        (["rollouts", "--set", "engine.nothing=1"], "engine.nothing"),
        (["rollouts", "--after-update", "--ks", "3"], "--after-update: there are no --methods, --ks and --repeats"),
        (["run", "--set", "cluster.partition=fast"], "--set cluster.partition=fast is for jobs: give --cluster"),
        (["run"], "bench run: nothing to compare; give --vary or --cell"),
        (["run", "--vary", "train.lr=1,2"], "train.lr"),
        (["run", "--vary", "speculation.k=1,many"], "speculation.k"),
    ],
)
def test_a_wrong_request_is_one_line(
    finished_run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["bench", arguments[0], "--run", str(finished_run), *arguments[1:]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_text_after_an_update_leaves_the_page_of_matched_pairs(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[BenchJob] = []
    monkeypatch.setattr("flows.commands.bench.measure", lambda job, options: jobs.append(job))
    for more in ([], ["--after-update"], ["--after-update", "--page", str(finished_run.parent / "own.md")]):
        assert invoke(["bench", "rollouts", "--run", str(finished_run), *more]) == 0
    folder = finished_run / "bench"
    pages = [folder / "rollouts.md", folder / "after-update.md", finished_run.parent / "own.md"]
    assert [job.page for job in jobs] == pages and {job.name for job in jobs} == {"rollouts"}


def test_a_benchmark_without_a_run_takes_no_settings_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "drafter", "--set", "engine.kv_cache_gib=1"]) == 2
    assert "--set engine.kv_cache_gib=1: bench drafter measures no run" in capsys.readouterr().err


def test_every_kind_of_picture_is_xml_with_one_name_space() -> None:
    bubble = Bubble(0, 100.0, 101.0)
    charts = (
        gantt([RankTimeline(bubble, rank_spans(bubble, []))]),
        line_chart({"": [(1, 1.0), (4, 2.0)]}, "x", "y", {2.0: "a < b"}),
    )
    for svg in charts:
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert "a &lt; b" in charts[1]
    assert ">4</text>" in charts[1]  # whole numbers on the x axis stay whole


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
