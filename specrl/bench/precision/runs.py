"""The runs of `specrl bench precision`: the same RL steps in BF16, with FP8 in generation, in both, and corrected.

For each setting and seed, a process runs the train stage's own loop on one rank, from the run's policy and drafter
before RL and with its calibration, and then measures the accuracy on held-out prompts with the same engine. The next
call does not repeat a measurement, as long as settings, code and the run's stages are the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from specrl.artifacts import (
    RESULT_FILE,
    CalibrateResult,
    PrepareResult,
    digest,
    read_result,
)
from specrl.bench.job import BenchJob
from specrl.bench.settings import PrecisionSettings, train_plainly
from specrl.config import Config, ConfigError, StageName, dump_config, parse_config
from specrl.config.algorithms import Algorithm
from specrl.context import StageContext
from specrl.keys import code_digest, files_digest
from specrl.report.results import find_stages
from specrl.step_record import StepRecord, read_steps

END_RESULT_FILE, CONTEXT_FILE = "end-result.json", "context.json"
UNLIMITED = 1e6
"""A limit that is never reached, since the benchmark measures disagreement, which must not stop a setting."""


@dataclass(frozen=True)
class PrecisionSetting:
    """The precision of each engine in one setting; it has a folder of its own by its place in `ALL_SETTINGS`."""

    name: str
    generation: str
    training: str
    corrected: bool = False


PRECISION_SETTINGS = (
    PrecisionSetting("BF16", "bf16", "bf16"),
    PrecisionSetting("FP8 generation only", "fp8", "bf16"),
    PrecisionSetting("FP8 both", "fp8", "fp8"),
    PrecisionSetting("FP8 both, corrected", "fp8", "fp8", corrected=True),
)
"""The settings that run by default."""
ALL_SETTINGS = (
    *PRECISION_SETTINGS,
    PrecisionSetting("FP8 generation only, corrected", "fp8", "bf16", corrected=True),
    PrecisionSetting("BF16, corrected", "bf16", "bf16", corrected=True),
)


def folders_of(settings: PrecisionSettings) -> dict[PrecisionSetting, str]:
    """Return the settings to run, in their order, each with the beginning of the name of its folder."""
    engines = {("fp8", "fp8"): "both", ("fp8", "bf16"): "generation", ("bf16", "bf16"): "neither"}
    return {
        item: str(index)
        for index, item in enumerate(ALL_SETTINGS)
        if not item.corrected or engines[item.generation, item.training] in settings.corrected
    }


@dataclass(frozen=True)
class EndResult:
    """The measurements at the end of the run of one setting and seed."""

    accuracy: float
    acceptance_length: float
    """The acceptance length on the held-out prompts, with drafts of full length; 1 without a drafter."""
    quantised_layers: int
    """The number of linear layers that compute in FP8 in the engine or the trainer."""
    engine_mode: str
    training_mode: str
    memory_gib: float | None
    """The largest GPU memory in use, in GiB; None on a CPU."""


@dataclass(frozen=True)
class PrecisionRun:
    """The finished run of one setting and seed."""

    setting: PrecisionSetting
    correction: str
    seed: int
    records: list[StepRecord]
    end_result: EndResult
    is_earlier: bool = False
    """Whether an earlier call of the benchmark measured it."""

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over the steps that have it; a step that trained on nothing lacks some."""
        return fmean(record.metrics[metric] for record in self.records if metric in record.metrics)

    def median(self, metric: str) -> float:
        """Return the median of a metric over all steps."""
        return median(record.metrics.get(metric, 0.0) for record in self.records)

    def row(self) -> dict[str, Any]:
        """Return the figures as a row for `--json`."""
        return {
            "generation": self.setting.generation,
            "training": self.setting.training,
            "correction": self.correction,
            "seed": self.seed,
            "token_mult_prob_error": self.mean("mismatch/token_mult_prob_error"),
            "kl": self.mean("mismatch/kl"),
            "accuracy": self.end_result.accuracy,
            "reward_last": self.records[-1].metrics["reward/mean"],
            "quantised_layers": self.end_result.quantised_layers,
            "engine_mode": self.end_result.engine_mode,
        }


def check(job: BenchJob) -> tuple[CalibrateResult, float]:
    """Return the calibration that all settings with FP8 use and its budget, before the first run.

    Raises:
        ConfigError: The run has not calibrated yet.
        ValueError: This machine cannot train the policy in FP8, so that the runs in BF16 would be lost time.
    """
    from transformers import AutoConfig

    from specrl.precision import native

    inputs, config = find_inputs(job.run_dir), job.config
    hf = AutoConfig.from_pretrained(read_result(inputs["prepare"], PrepareResult).policy_dir)
    native.check_training(hf, config.precision.model_copy(update={"training": "fp8"}))
    return read_result(inputs["calibrate"], CalibrateResult), config.precision.max_kl


def measure(
    job: BenchJob, folder: Path, setting: PrecisionSetting, seed: int, settings: PrecisionSettings
) -> PrecisionRun:
    """Return the run of one setting and seed, measured by an earlier call or by this one.

    Raises:
        RuntimeError: Its process failed; the message names its log.
    """
    context = make_context(job, folder, setting, seed, settings)
    job.check_taken([context.config])
    started = time.monotonic()
    known = is_measured(context, folder)
    if not known:
        run(context, folder, f"{setting.name}, seed {seed}", settings.threads)
    measured = PrecisionRun(
        setting,
        context.config.train.correction.name,
        seed,
        read_steps(context.stage_dir / "steps"),
        EndResult(**json.loads((context.stage_dir / END_RESULT_FILE).read_text())),
        is_earlier=known,
    )
    shutil.rmtree(context.stage_dir / "checkpoints", ignore_errors=True)  # gigabytes that nothing reads again
    row, spent = measured.row(), "measured before" if known else f"{time.monotonic() - started:.0f} s"
    print(
        f"{setting.name}, seed {seed}: token_mult_prob_error {row['token_mult_prob_error']:.4f}, accuracy "
        f"{row['accuracy']:.1%}, {spent}",
        flush=True,
    )
    return measured


def is_measured(context: StageContext, folder: Path) -> bool:
    """Return whether the folder has the result of this context, whose key stands for configuration, inputs and code."""
    path = folder / CONTEXT_FILE
    if not path.is_file() or not (context.stage_dir / END_RESULT_FILE).is_file():
        return False
    return bool(json.loads(path.read_text())["key"] == context.key)


def run(context: StageContext, folder: Path, name: str, num_threads: int) -> None:
    """Run one setting and seed anew, in a process of its own.

    Raises:
        RuntimeError: The process failed; the message names its log.
    """
    shutil.rmtree(folder, ignore_errors=True)
    path, log = folder / CONTEXT_FILE, folder / "log.txt"
    context.save(path)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    with log.open("wb") as file:
        command = [sys.executable, "-m", "specrl.bench.precision.one_run", str(path)]
        code = subprocess.run(command, env={**os.environ, **threads}, stdout=file, stderr=file, check=False).returncode
    if code:
        raise RuntimeError(f"bench precision, {name}: failed; log: {log}; the same command continues from here")


def find_inputs(run_dir: Path) -> dict[StageName, Path]:
    """Return the folders of the stages that every setting starts from.

    Raises:
        ConfigError: One of these stages has not finished.
    """
    stages = find_stages(run_dir)
    needed: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate")
    missing = [stage for stage in needed if stage not in stages or not (stages[stage].stage_dir / RESULT_FILE).exists()]
    if missing:
        raise ConfigError(
            f"run {run_dir.name} has not finished {missing[0]}; continue it with: specrl resume {run_dir.name}"
        )
    return {stage: stages[stage].stage_dir for stage in needed}


def make_context(
    job: BenchJob, folder: Path, setting: PrecisionSetting, seed: int, settings: PrecisionSettings
) -> StageContext:
    """Return the train stage of the run for one setting and seed, in a folder of its own.

    Raises:
        ConfigError: A stage that it starts from has not finished.
    """
    inputs = find_inputs(job.run_dir)
    config = make_config(job.config, folder, setting, seed, settings)
    results = [(path / RESULT_FILE, str(path)) for path in inputs.values()]
    sources = [(Path(__file__).with_name(name), name) for name in ("runs.py", "one_run.py")]
    code = code_digest(Path(__file__).parents[2])
    return StageContext(
        config=config,
        stage="train",
        key=f"train-{digest([dump_config(config), files_digest([*results, *sources]), code])}",
        stage_dir=folder / "stage",
        inputs=inputs,
        mlflow_run_id="",
    )


def make_config(
    config: Config, folder: Path, setting: PrecisionSetting, seed: int, settings: PrecisionSettings
) -> Config:
    """Return the run's configuration with the setting's precision, on one rank."""
    data = json.loads(config.model_dump_json(by_alias=True))
    data |= {"name": folder.name, "runs_dir": str(folder.parent), "seed": seed}
    data["precision"] |= {"generation": setting.generation, "training": setting.training}
    data["precision"]["kv_cache"] = settings.kv_cache if setting.generation == "fp8" else "bf16"
    data["precision"]["max_token_mult_prob_error"] = data["engine"]["parity_tolerance"] = UNLIMITED
    train_plainly(data, settings.num_steps)
    data["train"]["correction"] = _correction(config, settings.correction) if setting.corrected else "none"
    for section, key in (("train", "prompts_per_step"), ("train", "samples_per_prompt"), ("validate", "num_prompts")):
        data[section][key] = getattr(settings, key)
    data["stage_resources"]["train"] = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": settings.threads}
    return parse_config(data)


def _correction(config: Config, name: str) -> Algorithm | str:
    """Return the run's own correction with its options, if it has that name."""
    return config.train.correction if config.train.correction.name == name else name
