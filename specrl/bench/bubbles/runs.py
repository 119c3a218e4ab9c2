"""The runs of `specrl bench bubbles`: the same RL steps and seeds with every use of idle time and with plain decoding.

Each setting runs the train stage's own loop from the policy and drafter before RL, in fresh processes, one setting
after another. All do the same work: a rollout does not depend on drafts, so that they sample the same tokens, up to
near-ties in BF16.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from specrl.artifacts import PretrainResult, read_result, write_result
from specrl.bench.interleaved.side import begin_anew, train_side
from specrl.bench.job import BenchJob
from specrl.bench.settings import BubbleSettings, speculation_of, train_plainly
from specrl.bench.uses import USES, Use
from specrl.config import Config, ConfigError, StageName, parse_config
from specrl.config.methods import METHODS
from specrl.context import StageContext
from specrl.report.results import find_stages
from specrl.step_record import StepRecord, read_steps
from specrl.timeline import totals

PROBE = "refit/probe_acceptance_length"


OTHER_SEEDS = {"pregenerate_other": "pregenerate", "both_other": "both"}
"""The settings whose pre-generated text has other seeds than the rollouts, with the uses that they have beside that."""
BUBBLE_SETTINGS: Mapping[str, Use] = {
    **{"none" if name == "eagle3" else name: use for name, use in USES.items()},
    **{name: USES[use] for name, use in OTHER_SEEDS.items()},
}
"""The settings by name; that of EAGLE-3 is named after its use of idle time, `none`."""
ENDS = 3
"""The number of first steps, and of last steps, whose acceptance is compared."""


@dataclass(frozen=True)
class SettingRun:
    """The finished run of one setting."""

    name: str
    records: list[StepRecord]
    steps_dir: Path
    rollouts_dir: Path
    most_running: int
    """The largest number of requests that run at once."""

    @property
    def has_drafter(self) -> bool:
        """Whether the setting drafts with a trained drafter."""
        return METHODS[BUBBLE_SETTINGS[self.name].method].has_weights

    def total(self, metric: str) -> float:
        """Return a metric summed over the steps."""
        return sum(record.metrics[metric] for record in self.records)

    @property
    def num_tokens(self) -> int:
        """The number of response tokens of all ranks and steps."""
        return sum(rank.bubble.num_tokens for record in self.records for rank in record.ranks)

    @property
    def tokens_per_s(self) -> float:
        """The response tokens of all ranks per second of generation."""
        return self.num_tokens / self.total("timing/generation_s")

    def per_token(self, metric: str) -> float:
        """Return a metric per token: after a near-tie in BF16, responses of two settings can differ in length."""
        return self.total(metric) / self.num_tokens


def run_setting(context: StageContext, folder: Path, name: str, settings: BubbleSettings) -> SettingRun:
    """Run all steps of one setting anew, and wait for its ranks.

    Raises:
        RuntimeError: A rank failed; the message names its log.
    """
    begin_anew(context, folder)
    started = time.monotonic()
    with train_side(context, folder) as side:
        for _ in range(settings.num_steps):
            side.step()
    print(f"{name}: {settings.num_steps} steps in {time.monotonic() - started:.0f} s", flush=True)
    return SettingRun(
        name,
        read_steps(context.stage_dir / "steps"),
        context.stage_dir / "steps",
        context.stage_dir / "rollouts",
        context.config.engine.max_num_seqs,
    )


def make_context(job: BenchJob, folder: Path, name: str, settings: BubbleSettings) -> StageContext:
    """Return the train stage of the run with another draft method and use of bubbles, in a folder of its own.

    Raises:
        ConfigError: The run has no drafter, or has not finished the stages before RL.
    """
    stages = find_stages(job.run_dir)
    needed: tuple[StageName, ...] = ("prepare", "pretrain")
    missing = [stage for stage in needed if stage not in stages]
    if missing:
        raise ConfigError(
            f"run {job.run_dir.name} has not run {missing[0]}; continue it with: specrl resume {job.run_dir.name}"
        )
    read: tuple[StageName, ...] = (*needed, "calibrate")
    inputs = {stage: stages[stage].stage_dir for stage in read if stage in stages}
    if json.loads((inputs["pretrain"] / "result.json").read_text())["drafter_dir"] is None:
        raise ConfigError(f'run {job.run_dir.name} has no drafter; use one with speculation.method = "eagle3"')
    if settings.drafter is not None:
        inputs["pretrain"] = with_drafter(inputs["pretrain"], settings.drafter, folder.parent / "pretrain")
    return StageContext(
        config=make_config(job.config, folder, name, settings),
        stage="train",
        key=f"train-{name}",
        stage_dir=folder / "stage",
        inputs=inputs,
        mlflow_run_id="",
    )


def with_drafter(pretrained: Path, drafter_dir: Path, folder: Path) -> Path:
    """Write the pretrain stage's result with another drafter to a folder, and return the folder.

    Raises:
        ConfigError: There is no drafter in `drafter_dir`.
    """
    if not (drafter_dir / "config.json").is_file():
        raise ConfigError(f"drafter = {drafter_dir}: no drafter there (config.json is missing); give its directory")
    result = read_result(pretrained, PretrainResult)
    write_result(folder, result.model_copy(update={"drafter_dir": drafter_dir.absolute()}))
    return folder


def make_config(config: Config, folder: Path, name: str, settings: BubbleSettings) -> Config:
    """Return the run's configuration with the setting's drafts and use of bubbles, and the benchmark's sizes."""
    setting = BUBBLE_SETTINGS[name]
    data = json.loads(config.model_dump_json(by_alias=True))
    data |= {"name": folder.name, "runs_dir": str(folder.parent)}
    k = (config.speculation.k or 3) if METHODS[setting.method].drafts else 0
    data["speculation"] = speculation_of(config.speculation, setting.method, k).model_dump(mode="json")
    seeds = "other" if name in OTHER_SEEDS else settings.seeds
    data["bubbles"] = {"use": setting.bubbles, "seeds": seeds}
    train_plainly(data, settings.num_steps)
    for key in ("prompts_per_step", "samples_per_prompt"):
        if (value := getattr(settings, key)) is not None:
            data["train"][key] = value
    if settings.max_response_tokens is not None:
        data["sampling"]["max_response_tokens"] = settings.max_response_tokens
    data["stage_resources"]["train"] = {"nodes": 1, "ranks_per_node": settings.ranks, "cpus_per_rank": settings.threads}
    return parse_config(data)


def row(run: SettingRun, plain: SettingRun) -> dict[str, Any]:
    """Return the figures of one setting as a row for `--json`; the page explains them."""
    found = [totals([rank.bubble for rank in record.ranks]) for record in run.records]
    idle = sum(item.idle_s for item in found)
    return {
        "use": run.name,
        "throughput_ratio": run.tokens_per_s / plain.tokens_per_s,
        "decode_step_ratio": run.per_token("spec/decode_steps") / plain.per_token("spec/decode_steps"),
        "step_time_ratio": run.per_token("timing/step_s") / plain.per_token("timing/step_s"),
        "idle_share": idle / sum(item.generation_s for item in found),
        "used_share": sum(item.used_s for item in found) / idle if idle else 0.0,
        "overrun_share": sum(item.overrun_s for item in found) / run.total("timing/step_s"),
        "acceptance_length_first": fmean(length for _, length in acceptance(run)[:ENDS]),
        "acceptance_length_last": fmean(length for _, length in acceptance(run)[-ENDS:]),
    }


def acceptance(run: SettingRun) -> list[tuple[int, float]]:
    """Return (step, acceptance length) of each step that has one.

    A drafter is measured on the guard's probe after the step's update, which has the same prompts and draft length in
    every step, while a step's own drafts depend on the controller and on how many requests stored text serves. Without
    a drafter, the acceptance is that of stored text, of which the first step has none, or else of recent rollouts.
    """
    if run.has_drafter:
        return [(record.step, record.metrics[PROBE]) for record in run.records if PROBE in record.metrics]
    source = "replay" if BUBBLE_SETTINGS[run.name].bubbles == "pregenerate" else "recent"
    counts = [(record.step, record.by_source.get(source, (0, 0, 0))) for record in run.records if record.step]
    return [(step, 1 + accepted / drafts if drafts else 1.0) for step, (drafts, _, accepted) in counts]
