"""Stage `export`: writes policy and drafter as inference servers load them, and tries the drafter in a fresh vLLM."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from specrl import logs
from specrl.artifacts import ExportResult, TrainResult, ValidateResult, write_result, write_text
from specrl.config import Config
from specrl.context import StageContext
from specrl.data.problems import derive_seed
from specrl.data.prompts import PromptSource
from specrl.distributed import join, leave
from specrl.export.card import model_card, serve_command
from specrl.export.speculators import write_speculators
from specrl.models.sources import load_tokenizer
from specrl.progress import Progress
from specrl.rollout.collect import Origin, collect
from specrl.rollout.engine import start_engine
from specrl.tracking import SCORE_TAG, Tracker, lineage_tags, stage_run


def main(context: StageContext) -> None:
    """Run the stage in this rank."""
    started = time.monotonic()
    logs.set_up(context.config.cluster.log_level)
    ranks = join()
    trained = context.input("train", TrainResult)
    with stage_run(context, ranks) as tracker, Progress(context.stage_dir, enabled=ranks.is_first) as progress:
        policy_dir, drafter_dir = context.stage_dir / "policy", drafter_directory(context.stage_dir, trained)
        with logs.phase("copy of policy and drafter"):
            if ranks.is_first:
                copy_directory(trained.policy_dir, policy_dir)
                if trained.drafter_dir is not None and drafter_dir not in (None, policy_dir):
                    copy_directory(trained.drafter_dir, drafter_dir)
            ranks.barrier()
        acceptance_length = None
        if drafter_dir is not None:
            acceptance_length = try_out(context.config, policy_dir, drafter_dir, progress)
        if ranks.is_first:
            if drafter_dir is not None and acceptance_length is not None:
                publish(context, trained, drafter_dir, acceptance_length)
                tracker.log_run_metrics({"export/vllm_acceptance_length": acceptance_length})
            register(context, trained, policy_dir, drafter_dir, acceptance_length, tracker)
            result = ExportResult(
                policy_dir=policy_dir,
                drafter_dir=drafter_dir,
                vllm_acceptance_length=acceptance_length,
                seconds=time.monotonic() - started,
            )
            write_result(context.stage_dir, result)
    leave()


def drafter_directory(stage_dir: Path, trained: TrainResult) -> Path | None:
    """Return the exported drafter's folder: the policy's for a multi-token-prediction layer, None without a drafter."""
    if trained.drafter_dir is None:
        return None
    return stage_dir / ("policy" if trained.drafter_dir == trained.policy_dir else "drafter")


def copy_directory(source: Path, target: Path) -> None:
    """Copy a folder's files, as hard links where the file system can, so that gigabytes are not written twice."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        (target / path.name).unlink(missing_ok=True)
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)


def try_out(config: Config, policy_dir: Path, drafter_dir: Path, progress: Progress) -> float:
    """Return the acceptance length of the exported folders in a fresh vLLM, on the prompts of `validate`."""
    own = drafter_dir == policy_dir  # vLLM then finds everything in the one directory
    with logs.phase("start of the engine"):
        engine = start_engine(config, policy_dir, None if own else drafter_dir)
    engine.set_k(engine.longest_k)
    prompts = PromptSource(config, load_tokenizer(policy_dir)).held_out(config.validate_.num_prompts)
    with logs.phase("generation with the exported drafter"):
        unscored = collect(
            engine,
            prompts,
            1,
            config,
            None,
            Origin(derive_seed(config.seed, "validate"), step=0),
            on_progress=lambda done, total: progress.update(
                done, total, unit="response", phase="trying out the exported drafter"
            ),
        )
    engine.shutdown()
    return unscored.generation.stats.acceptance_length


def publish(context: StageContext, trained: TrainResult, drafter_dir: Path, acceptance_length: float) -> None:
    """Write the model card and, for EAGLE-3, the `speculators` format."""
    config, stage_dir = context.config, context.stage_dir
    policy_dir, k = stage_dir / "policy", config.speculation.k
    validated = context.input("validate", ValidateResult)
    exported = context.run_dir / "export"
    command = serve_command(exported / "policy", exported / drafter_dir.name, k)
    write_text(drafter_dir / "README.md", model_card(config, trained, validated, acceptance_length, command))
    if drafter_dir != policy_dir:
        write_speculators(drafter_dir, stage_dir / "drafter-speculators", str(exported / "policy"), k)


def register(
    context: StageContext,
    trained: TrainResult,
    policy_dir: Path,
    drafter_dir: Path | None,
    acceptance_length: float | None,
    tracker: Tracker,
) -> None:
    """Register the policy and its drafter as model versions, with what they come from.

    The best policy of the validations goes first, if it is another one: MLflow calls the newest version `latest`.
    """
    name, best = context.config.name, trained.best
    lineage = lineage_tags(context)
    tags = {**lineage, "specrl.policy_version": str(trained.policy_step), "specrl.policy_dir": str(policy_dir)}
    if best is None:
        tags[SCORE_TAG] = str(context.input("validate", ValidateResult).accuracy_after)
    elif best.step == trained.policy_step:
        tags[SCORE_TAG] = str(best.value)
    else:
        found = {**lineage, "specrl.policy_version": str(best.step), SCORE_TAG: str(best.value)}
        tracker.register_model_version(f"{name}-policy", best.policy_dir, found, "best-policy")
        if best.drafter_dir is not None:
            tracker.register_model_version(f"{name}-drafter", best.drafter_dir, found, "best-drafter")
    tracker.register_model_version(f"{name}-policy", policy_dir, tags)
    if drafter_dir is not None:
        tags |= {"specrl.acceptance_length": f"{acceptance_length:.3f}"}
        tracker.register_model_version(f"{name}-drafter", drafter_dir, tags)
