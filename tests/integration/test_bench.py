"""`specrl bench` from the command line on a toy policy and drafter."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from specrl.artifacts import PrepareResult, write_result, write_text
from specrl.bench.options import GPU_SECTIONS
from specrl.config import Config, dump_config
from specrl.report.results import read_config
from specrl.tracking.runs import start_parent_run
from specrl.tracking.store import tracking_uri
from tests.exactness.toy import policy_weights, write_policy
from tests.integration.finished_run import write_finished_run
from tests.integration.pipeline_runs import finish, specrl

pytestmark = pytest.mark.engine
COLUMNS = {
    "method",
    "k",
    "batch",
    "tokens_per_s",
    "speedup",
    "speedup_min",
    "speedup_max",
    "speedup_over_stock",
    "stock_tokens_per_s",
    "acceptance_length",
    "acceptance_rate_per_pos",
    "decode_steps",
    "responses",
    "responses_differing",
}

CONTRACT = {"drafter", "kind", "layers", "loss", "k", "temperature", "batch"}
CONTRACT |= {"acceptance_length", "acceptance_rate_per_pos", "speedup"}
"""What every row of `specrl bench drafter` on a file of prompts has."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_finished_run(tmp_path_factory.mktemp("bench") / "runs")


def bench(run_dir: Path, name: str, *options: str) -> tuple[Any, str]:
    """What it wrote as JSON, most often rows, and its page."""
    page = run_dir / "bench" / f"{name}.md"
    paths = ["--run", str(run_dir), "--page", str(page)]
    output = finish(specrl("bench", name, *paths, *options), seconds=1200)
    assert f"page: {page}" in output
    return json.loads(page.with_suffix(".json").read_text()), page.read_text()


def test_rollouts_are_compared_on_the_same_tokens(run_dir: Path) -> None:
    options = [
        "--methods",
        "eagle3,eagle3+replay",
        "--ks",
        "3,adaptive",
        "--batches",
        "2,8",
        "--repeats",
        "2",
    ]
    rows, page = bench(run_dir, "rollouts", *options, "--max-tokens", "8")
    assert all(set(row) == COLUMNS for row in rows)
    cells = {(row["method"], row["k"], row["batch"]): row for row in rows}
    assert set(cells) == {
        *(("none", 0, batch) for batch in (2, 8)),
        *(("eagle3", k, batch) for k in (3, "adaptive") for batch in (2, 8)),
        *(("eagle3+replay", "adaptive", batch) for batch in (2, 8)),
    }
    for row in rows:
        assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
        assert row["tokens_per_s"] > 0
    fixed, plain = cells["eagle3", 3, 8], cells["none", 0, 8]
    assert plain["speedup"] == 1
    # Stock vLLM, with its own sampler, takes part in every round.
    for batch in (2, 8):
        assert len({row["stock_tokens_per_s"] for row in rows if row["batch"] == batch}) == 1
    assert all(row["speedup_over_stock"] > 0 and row["stock_tokens_per_s"] > 0 for row in rows)
    assert "over stock" in page
    assert fixed["acceptance_length"] > 1
    assert len(fixed["acceptance_rate_per_pos"]) == 3
    assert fixed["decode_steps"] < plain["decode_steps"]
    assert all(row["responses_differing"] == 0 and row["responses"] > 0 for row in rows)  # FP32: every token the same
    assert "| 8 | eagle3 | 3 |" in page


def test_text_of_the_same_seed_is_followed_until_an_update_shows(run_dir: Path) -> None:
    """The policy before RL is the one after it, and then one whose head differs."""
    options = ("--after-update", "--batches", "8", "--max-tokens", "48")
    rows, page = bench(run_dir, "rollouts", *options)
    assert rows[-1]["agree"] == [48] * 8 and rows[-1]["accepted"] == 1 and rows[-1]["followed"] > 0.8
    assert "| all | 1 |" in page
    other = run_dir.with_name("updated")
    shutil.copytree(run_dir, other)
    before = policy_weights(0)
    before["lm_head.weight"] *= 0.98
    prepared = PrepareResult(policy_dir=write_policy(other / "before", before), seconds=1.0)
    write_result(other / "stages" / "prepare-0", prepared)
    rows, _ = bench(other, "rollouts", *options)
    by_part = {row["part"]: row for row in rows}
    assert 0 < sum(by_part["all"]["agree"]) < 8 * 48
    assert by_part["before the first difference"]["followed"] > by_part["from it on"]["followed"]


def test_drafters_are_compared_over_the_same_trainings(run_dir: Path) -> None:
    """Initialised on the task, on general text and not at all; frozen and online. No drafter changes a token."""
    sizes = ["--steps", "2", "--prompts", "8", "--set", "drafter.epochs=2", "--set", "train.prompts_per_step=4"]
    sizes += ["--set", "train.samples_per_prompt=2", "--set", "sampling.max_response_tokens=16"]
    sizes += ["--set", "train.correction=none", "--set", "train.drop_zero_signal_groups=false"]
    rows, page = bench(run_dir, "drafter", *sizes)
    assert [row["cell"] for row in rows] == [
        "plain",
        *(f"{name}, {training}" for name in ("none", "general", "task") for training in ("frozen", "online")),
    ]
    assert all(row["tokens_equal"] for row in rows) and "| task, online |" in page
    by_step = {row["cell"]: row["acceptance_length_by_step"] for row in rows}
    # Before the first update a drafter that will be trained online is the frozen one.
    assert by_step["task, frozen"][0] == by_step["task, online"][0]
    assert by_step["task, frozen"] != by_step["task, online"]
    assert all(len(lengths) == 3 and min(lengths) >= 1 for lengths in by_step.values())
    assert (run_dir / "bench" / "drafter" / "initial" / "general" / "config.json").is_file()


PLAIN = "plain: speculation.method=none, speculation.k=0, bubbles.use=none"


def test_whole_trainings_take_their_steps_in_turn_and_sample_the_same_tokens(run_dir: Path) -> None:
    """In FP32, EAGLE-3 with replay and online training leaves every token as it is."""
    values = json.loads(dump_config(read_config(run_dir))) | {"name": "whole"}
    values["speculation"]["method"], values["bubbles"]["use"] = "eagle3+replay", "both"
    values["train"] |= {"prompts_per_step": 4, "samples_per_prompt": 2, "correction": "none"}
    values["train"]["drop_zero_signal_groups"] = False  # or a step may train on nothing, and measure no mismatch
    values["sampling"]["max_response_tokens"] = 16
    config = Config.model_validate(values)
    write_text(config.run_dir / "config.json", dump_config(config))
    shutil.copytree(run_dir / "stages", config.run_dir / "stages")
    mlflow_run = start_parent_run(config)
    cells = ["--cell", PLAIN, "--cell", "both:", "--vary", "seed=1,2", "--steps", "2"]
    rows, page = bench(config.run_dir, "run", *cells)
    assert [(row["cell"], row["seed"], row["is_baseline"], row["tokens_equal"]) for row in rows] == [
        ("plain", "1", True, True),
        ("both", "1", False, True),
        ("plain", "2", True, True),
        ("both", "2", False, True),
    ]
    plain, both, *others = rows
    assert plain["step_min"] == plain["step_ratio"] == plain["step_max"] == 1
    assert 0 < both["step_min"] <= both["step_ratio"] <= both["step_max"]
    assert both["reward_mean"] == plain["reward_mean"] and both["generation_ratio"] > 0 < both["end_to_end_ratio"]
    assert both["accuracy"] == plain["accuracy"] and 0 <= both["accuracy"] <= 1
    assert both["decode_steps"] < plain["decode_steps"] and both["acceptance_length"] > 1
    assert 1 <= both["token_mult_prob_error"] < 1.001 and both["idle_s"] >= 0 and both["step_s"] > 0
    assert others[0]["token_mult_prob_error"] != plain["token_mult_prob_error"]  # the other seed
    assert "| both | 2 |" in page and "against **plain**" in page
    records = sorted((config.run_dir / "bench" / "run").glob("group-0/cell-1/stage/steps/step=*.json"))
    assert len(records) == 3  # the warm-up is a step, too
    assert not list(records[0].parents[1].glob("checkpoints/step=*"))  # its time would be that of the step
    metrics = MlflowClient(tracking_uri(config)).get_run(mlflow_run).data.metrics
    assert metrics["speedup/step"] == pytest.approx(both["step_ratio"])
    assert metrics["speedup/end_to_end"] == pytest.approx(both["end_to_end_ratio"])


def test_precisions_are_cells_like_any_others(run_dir: Path) -> None:
    """In FP32 nothing rounds otherwise in the two engines: what is left is how alike they quantise."""
    cells = ["base:", "generation: precision.generation=fp8", "both: precision.generation=fp8, precision.training=fp8"]
    sizes = [
        "--set",
        "train.prompts_per_step=4",
        "--set",
        "train.samples_per_prompt=2",
        "--set",
        "engine.parity_tolerance=9",
    ]
    sizes += ["--set", "train.drop_zero_signal_groups=false"]
    sizes += ["--set", "precision.max_token_mult_prob_error=1e6", "--steps", "2", "--warm-up", "0", "--together", "2"]
    rows, _ = bench(run_dir, "run", *[word for cell in cells for word in ("--cell", cell)], *sizes)
    errors = {row["cell"]: row["token_mult_prob_error"] for row in rows}
    assert errors["base"] < errors["both"] < errors["generation"]


def test_a_first_look_at_a_gpu_runs_on_a_cpu_too(tmp_path: Path) -> None:
    """Everything runs at small size through the same code."""
    page, path = tmp_path / "gpu.md", tmp_path / "gpu.json"
    paths = ["--runs-dir", str(tmp_path / "runs"), "--page", str(page)]
    finish(specrl("bench", "gpu", *paths, "--short"), seconds=2400)
    rows = json.loads(path.read_text())
    states = {row["section"]: row["status"] for row in rows if "status" in row}
    assert set(states) == set(GPU_SECTIONS)
    assert all(state.startswith("done") for state in states.values())
    by_section = {name: [row for row in rows if row["section"] == name and "status" not in row] for name in states}
    assert [row["unexplained"] for row in by_section["exactness"]] == [0] * len(by_section["exactness"])
    assert all(row["accepted"] > 0 for row in by_section["exactness"])
    assert [row["near_ties"] for row in by_section["exactness"] if row["type"] == "float32"] == [0, 0]
    assert all(row["unexplained"] == 0 and row["us"] > 0 for row in by_section["sampler"])
    assert {row["layers"] for row in by_section["training"]} == {"bf16", "fp8, emulated"}
    assert [row["tokens"] for row in by_section["drafter"]] == [48, 384]
    # Two ranks, in place of GPUs: first with an engine each, then one engine.
    steps = by_section["step"]
    layouts = [(row["ranks"], row["engine_tp"], row["policy_tp"], row["step"]) for row in steps]
    assert layouts == [(2, 1, 2, 0), (2, 1, 2, 1), (2, 2, 2, 0), (2, 2, 2, 1)]
    for row in steps:
        parts = [row[f"{part}_s"] for part in ("generation", "policy_update", "drafter_update", "refit")]
        assert min(parts) > 0 and sum(parts) < row["step_s"]
        assert row["tokens"] == 32 and row["acceptance_length"] > 1.5  # full length; random drafts, accepted by chance
        assert (row["trained"], row["trainer"], row["engine"]) == ("all", "fp8", "fp8")
    assert len(by_section["communication"]) == 5 and all(row["gb_per_s"] > 0 for row in by_section["communication"])
    engines = {row["engine"] for row in by_section["generation"]}
    assert {"stock vLLM", "specrl, plain", "specrl, k = 3, acceptance 2.5"} <= engines
    assert "## Exactness" in page.read_text()
    # The same command has nothing left to do.
    output = finish(specrl("bench", "gpu", *paths, "--short", "--sections", "exactness"))
    assert f"exactness: {states['exactness']}" in output


def read(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as response:
        return str(response.read().decode())


def test_a_run_is_served_with_its_drafter_until_the_command_is_killed(run_dir: Path) -> None:
    """The server drafts for requests at the run's own temperature, and none of its processes outlives the command."""
    process = specrl("serve-model", str(run_dir))
    assert process.stdout is not None
    command = shlex.split(process.stdout.readline())
    said: list[str] = []
    Thread(target=lambda: said.extend(process.stdout or ()), daemon=True).start()  # or its log would fill the pipe
    assert command[:3] == ["vllm", "serve", str(run_dir / "policy")]
    assert json.loads(command[4])["model"] == str(run_dir / "drafter")
    url, deadline = f"http://127.0.0.1:{command[-1]}", time.monotonic() + 1200
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "".join(said)
        with suppress(OSError):
            read(f"{url}/health")
            break
        time.sleep(0.2)
    for text in ("ace", "gik", "moq", "ace"):
        body = {"model": str(run_dir / "policy"), "prompt": text, "max_tokens": 24, "temperature": 1.0}
        read(f"{url}/v1/completions", body)
    page = read(f"{url}/metrics")
    drafts, accepted = (
        sum(map(float, re.findall(rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$", page, re.MULTILINE)))
        for name in ("drafts", "accepted_tokens")
    )
    assert 1 + accepted / drafts > 1.2
    started = psutil.Process(process.pid).children(recursive=True)
    assert started, "vLLM has started processes of its own"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not [left for left in alive if left.status() != psutil.STATUS_ZOMBIE]


def test_a_drafter_is_measured_on_a_file_of_prompts(run_dir: Path, tmp_path: Path) -> None:
    data, page = tmp_path / "prompts.jsonl", tmp_path / "drafter.md"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ace", "gik", "moq")))
    paths = ["--model", run_dir / "policy", "--drafter", run_dir / "drafter", "--data", data]
    paths += ["--page", page, "--runs-dir", tmp_path / "runs"]
    sizes = ["--ks", "2,3", "--temperatures", "1.0", "--batches", "2", "--repeats", "2", "--max-tokens", "24"]
    finish(specrl("bench", "drafter", *map(str, paths), *sizes), seconds=1200)
    found = json.loads(page.with_suffix(".json").read_text())
    assert [(row["kind"], row["k"]) for row in found] == [
        *(("plain", 0), ("ngram", 2), ("ngram", 3)),
        *(("eagle3", 2), ("eagle3", 3)),
    ]
    assert all(set(row) >= CONTRACT and row["responses_differing"] == 0 for row in found)  # FP32: every token the same
    plain, longest = found[0], found[-1]
    assert (plain["speedup"], plain["acceptance_length"]) == (1, 1)
    assert longest["acceptance_length"] > 1.2 and len(longest["acceptance_rate_per_pos"]) == 3
    assert "0 of 24 responses with" in page.read_text()
