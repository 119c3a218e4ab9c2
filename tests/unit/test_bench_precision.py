"""`specrl bench precision`: its settings, its rows and its page, from runs that are made up."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from flows.cli import invoke
from specrl.artifacts import CalibrateResult, PrepareResult, PretrainResult, write_json, write_result, write_text
from specrl.bench.job import BenchJob
from specrl.bench.precision import main as precision
from specrl.bench.precision import runs
from specrl.bench.precision.page import kv_scales_share, order, table, update_cost, write_page
from specrl.bench.precision.runs import (
    PRECISION_SETTINGS,
    EndResult,
    PrecisionRun,
    PrecisionSetting,
    folders_of,
    make_config,
)
from specrl.bench.settings import PrecisionSettings
from specrl.config import dump_config, load_config
from specrl.context import StageContext
from specrl.step_record import StepRecord, write_step

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "smoke.toml")
ERRORS = {"BF16": 1.01, "FP8 generation only": 1.08, "FP8 both": 1.03, "FP8 both, corrected": 1.03}
CALIBRATED = CalibrateResult(
    scales_path=Path("scales.json"),
    layers_path=Path("layers.arrow"),
    bf16_layers=["layers.0.linear_fc2", "layers.1.linear_fc2"],
    kl_all_fp8=0.02,
    kl_chosen=0.004,
    seconds=1.0,
)
KEYS = "generation training correction seed token_mult_prob_error kl accuracy reward_last quantised_layers engine_mode"


def record(step: int, error: float) -> StepRecord:
    metrics = {
        "mismatch/token_mult_prob_error": error,
        "mismatch/bulk_error": error - 0.001,
        "mismatch/kl": error - 1,
        "reward/mean": 0.1 * step,
        "timing/policy_update_s": 2.0,
        "timing/step_s": 10.0,
        "performance/generation_tokens_per_s": 300.0,
        "performance/training_tokens_per_s": 400.0,
        "refit/mean_abs_logprob_diff": 0.02,
    }
    return StepRecord(step, metrics, 0, [], [], {}, [])


def measured(setting: PrecisionSetting, seed: int) -> PrecisionRun:
    error = ERRORS[setting.name] + 0.001 * seed
    mode = "emulated" if setting.generation == "fp8" else "off"
    end_result = EndResult(0.5, 2.1, 20, mode, mode, None)
    correction = "tis" if setting.corrected else "none"
    return PrecisionRun(setting, correction, seed, [record(step, error) for step in range(3)], end_result)


def test_settings_differ_in_precision_and_correction_only() -> None:
    settings = PrecisionSettings(correction="icepop", kv_cache="fp8", num_steps=4, num_prompts=5, prompts_per_step=6)
    configs = [make_config(CONFIG, Path("bench/x"), setting, 9, settings) for setting in PRECISION_SETTINGS]
    assert [(c.precision.generation, c.precision.training, c.precision.kv_cache) for c in configs] == [
        ("bf16", "bf16", "bf16"),
        ("fp8", "bf16", "fp8"),
        ("fp8", "fp8", "fp8"),
        ("fp8", "fp8", "fp8"),
    ]
    assert [c.train.correction.name for c in configs] == ["none", "none", "none", "icepop"]
    for config in configs:
        assert (config.seed, config.train.num_steps, config.validate_.num_prompts) == (9, 4, 5)
        assert (config.train.prompts_per_step, config.train.samples_per_prompt) == (6, 4)
        assert config.engine.parity_tolerance > 1e3  # reported, not enforced
        assert config.resources_of("train").ranks == 1


def test_every_setting_can_run_with_the_correction_and_each_keeps_its_folder() -> None:
    assert list(folders_of(PrecisionSettings())) == list(PRECISION_SETTINGS)
    found = folders_of(PrecisionSettings(corrected=("neither", "generation", "both")))
    assert [setting.name for setting in found][-2:] == ["FP8 generation only, corrected", "BF16, corrected"]
    assert len(found) == len(set(found.values())) == 6
    assert {setting: found[setting] for setting in PRECISION_SETTINGS} == folders_of(PrecisionSettings())
    configs = [make_config(CONFIG, Path("bench/x"), setting, 9, PrecisionSettings()) for setting in found]
    assert [config.train.correction.name for config in configs] == ["none", "none", "none", "tis", "tis", "tis"]
    assert list(folders_of(PrecisionSettings(corrected=()))) == list(PRECISION_SETTINGS[:3])


def test_the_page_has_a_line_per_setting_and_says_whether_the_order_holds(tmp_path: Path) -> None:
    found = [measured(setting, seed) for seed in (1, 2, 3) for setting in PRECISION_SETTINGS]
    assert [list(item.row()) for item in found] == [KEYS.split()] * 12
    job = BenchJob("", tmp_path, {}, "specrl bench precision", tmp_path / "page.md", tmp_path / "rows.json")
    write_page(job, PrecisionSettings(), found, CALIBRATED, 0.005)
    text = job.page.read_text()
    assert "| FP8 both | none | 1.0320 (1.0310 to 1.0330) |" in text
    assert "BF16 < FP8 both < FP8 generation only holds." in text
    assert "2 of 22 linear layers stay in BF16; KL on held-out prompts 0.00400 nats per token, within its" in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {"page-reward.svg", "page-error.svg"}
    rest = [item for item in found if item.seed != 2]
    worse = PrecisionRun(PRECISION_SETTINGS[2], "none", 2, [record(0, 1.5)], found[0].end_result)
    others = [item for item in found if item.seed == 2 and item.setting is not PRECISION_SETTINGS[2]]
    assert "holds for 2 of 3 seeds" in order([*rest, *others, worse])


def test_an_update_costs_what_a_token_costs_and_what_was_not_measured_is_not_zero() -> None:
    plain, other = measured(PRECISION_SETTINGS[0], 1), measured(PRECISION_SETTINGS[2], 1)
    assert kv_scales_share(other) is None
    for item in other.records:  # twice the tokens in thrice the time
        item.metrics.update({"timing/policy_update_s": 6.0, "performance/training_tokens_per_s": 800 / 3})
    other.records[0].metrics.update({"performance/training_tokens_per_s": 0.0})  # nothing trained on
    other.records[1].metrics.update({"timing/kv_scales_s": 0.2})
    assert update_cost(other, plain) == pytest.approx(1.5)
    assert kv_scales_share(other) == pytest.approx(0.02)
    lines = table([plain, other]).splitlines()
    columns = [cell.strip() for cell in lines[0].split("|")]
    cells = [dict(zip(columns, map(str.strip, line.split("|")), strict=True)) for line in lines[2:]]
    assert [(row["update"], row["KV scales"]) for row in cells] == [("1.00x", "-"), ("1.50x", "2.0%")]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run up to its calibration, of a policy with heads of 64 channels."""
    write_text(tmp_path / "config.json", dump_config(CONFIG))
    LlamaConfig(hidden_size=128, num_attention_heads=2).save_pretrained(tmp_path / "policy")
    pretrained = PretrainResult(drafter_dir=None, rollouts_dir=tmp_path, num_responses=1, reward_mean=0.0, seconds=1.0)
    results = {
        "prepare": PrepareResult(policy_dir=tmp_path / "policy", seconds=1.0),
        "pretrain": pretrained,
        "calibrate": CALIBRATED,
    }
    for stage, result in results.items():
        write_result(tmp_path / "stages" / f"{stage}-0", result)
    return tmp_path


def test_what_was_measured_is_measured_again_only_where_something_differs(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(context: StageContext, folder: Path, name: str, num_threads: int) -> None:
        started.append(name)
        if len(started) == 3:
            raise RuntimeError(f"{name} failed")
        context.save(folder / runs.CONTEXT_FILE)
        write_step(context.stage_dir / "steps", record(0, 1.1))
        write_json(context.stage_dir / runs.END_RESULT_FILE, asdict(EndResult(0.5, 2.1, 20, "off", "off", None)))
        write_text(context.stage_dir / "checkpoints" / "large", "")

    monkeypatch.setattr(runs, "run", run)
    settings = PrecisionSettings(seeds=(1,), num_steps=2)
    job = BenchJob(
        "specrl.bench.precision.main:main",
        run_dir,
        settings.model_dump(mode="json"),
        "",
        tmp_path / "page.md",
        tmp_path / "rows.json",
    )
    with pytest.raises(RuntimeError, match="FP8 both, seed 1 failed"):
        precision.main(job)
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 2
    assert not list(run_dir.glob("bench/precision/*/stage/checkpoints"))
    precision.main(job)
    names = [f"{setting.name}, seed 1" for setting in PRECISION_SETTINGS]
    assert started[3:] == names[2:]
    assert "2 of these 4 runs are an earlier call's" in job.page.read_text()
    precision.main(job)
    assert len(started) == 5
    write_result(run_dir / "stages" / "calibrate-0", CALIBRATED.model_copy(update={"seconds": 2.0}))
    precision.main(job)
    assert started[5:] == names
    precision.main(replace(job, settings={**job.settings, "correction": "icepop"}))
    assert started[9:] == names[3:]


def test_a_policy_that_the_gpu_cannot_train_is_refused_before_the_first_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BenchJob("", run_dir, {}, "", run_dir / "page.md", run_dir / "rows.json")
    assert runs.check(job) == (CALIBRATED, CONFIG.precision.max_kl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="heads of 64 channels"):
        runs.check(job)


def test_a_wrong_setting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "precision", "--run", str(tmp_path), "--correction", "magic"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "correction" in line
    assert "icepop" in line
