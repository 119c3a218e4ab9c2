"""`specrl bench precision`: its settings, its rows and its page, from runs that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli import invoke
from specrl.bench.job import BenchJob
from specrl.bench.precision import SETTINGS, Measured, Outcome, Setting, make_config
from specrl.bench.report_precision import order, write
from specrl.bench.settings import PrecisionSettings
from specrl.config import load_config
from specrl.steps import StepRecord

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "smoke.toml")
ERRORS = {"BF16": 1.01, "FP8 generation only": 1.08, "FP8 both": 1.03, "FP8 both, corrected": 1.03}
KEYS = "generation training correction seed token_mult_prob_error kl accuracy reward_last quantised_layers engine_mode"


def record(step: int, error: float) -> StepRecord:
    metrics = {
        "mismatch/token_mult_prob_error": error,
        "mismatch/kl": error - 1,
        "reward/mean": 0.1 * step,
        "timing/policy_update_s": 2.0,
        "timing/step_s": 10.0,
        "timing/kv_scales_s": 0.1,
        "performance/generation_tokens_per_s": 300.0,
    }
    return StepRecord(step, metrics, 0, [], [], {}, [])


def measured(setting: Setting, seed: int) -> Measured:
    error = ERRORS[setting.name] + 0.001 * seed
    mode = "emulated" if setting.generation == "fp8" else "off"
    outcome = Outcome(0.5, 2.1, 20, mode, mode, None)
    correction = "tis" if setting.corrected else "none"
    return Measured(setting, correction, seed, [record(step, error) for step in range(3)], outcome)


def test_settings_differ_in_precision_and_correction_only() -> None:
    settings = PrecisionSettings(correction="icepop", kv_cache="fp8", num_steps=4, num_prompts=5)
    configs = [make_config(CONFIG, Path("bench/x"), setting, 9, settings) for setting in SETTINGS]
    assert [(c.precision.generation, c.precision.training, c.precision.kv_cache) for c in configs] == [
        ("bf16", "bf16", "bf16"),
        ("fp8", "bf16", "fp8"),
        ("fp8", "fp8", "fp8"),
        ("fp8", "fp8", "fp8"),
    ]
    assert [c.train.importance_correction for c in configs] == ["none", "none", "none", "icepop"]
    for config in configs:
        assert (config.seed, config.train.num_steps, config.validate_.num_prompts) == (9, 4, 5)
        assert config.train.prompts_per_step == CONFIG.train.prompts_per_step
        assert config.resources_of("train").ranks == 1


def test_the_page_has_a_line_per_setting_and_says_whether_the_order_holds(tmp_path: Path) -> None:
    found = [measured(setting, seed) for seed in (1, 2, 3) for setting in SETTINGS]
    assert [list(item.row()) for item in found] == [KEYS.split()] * 12
    job = BenchJob("", tmp_path, {}, "specrl bench precision", tmp_path / "page.md")
    write(job, PrecisionSettings(), found)
    text = job.page.read_text()
    assert "| FP8 both | none | 1.0320 (1.0310 to 1.0330) |" in text
    assert "BF16 < FP8 both < FP8 generation only holds." in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {"page-reward.svg", "page-error.svg"}
    rest = [item for item in found if item.seed != 2]
    worse = Measured(SETTINGS[2], "none", 2, [record(0, 1.5)], found[0].outcome)
    others = [item for item in found if item.seed == 2 and item.setting is not SETTINGS[2]]
    assert "holds for 2 of 3 seeds" in order([*rest, *others, worse])


def test_a_wrong_setting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "precision", "--run", str(tmp_path), "--correction", "magic"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "correction" in line
    assert "icepop" in line
