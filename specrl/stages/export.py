"""Stage `export`: writes policy and drafter for inference servers, and tries the drafter in a fresh vLLM."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from specrl import logs
from specrl.artifacts import Acceptance, ExportResult, TrainResult, ValidateResult, write_result, write_text
from specrl.context import StageContext
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import start_rewards
from specrl.distributed import Ranks
from specrl.export.card import CARD_FILE, ExportedDrafter, model_card, serve_command
from specrl.export.formats import FORMATS
from specrl.lineage.history import link_files
from specrl.lineage.record import code_of
from specrl.models.sources import load_tokenizer
from specrl.progress import Progress
from specrl.rollout.engine import start_engine
from specrl.stages.rank import stage_rank
from specrl.tracking.log import Log
from specrl.tracking.sender import SCORE_TAG
from specrl.tracking.tracker import Tracker
from specrl.training import lora
from specrl.validation.answering import held_out_sets, measure_acceptance

logger = logging.getLogger(__name__)

MOST_PROMPTS = 64
"""The maximum number of held-out prompts on which the exported drafter is tried."""


def main(context: StageContext) -> None:
    started = time.monotonic()
    trained = context.input("train", TrainResult)
    with stage_rank(context) as (ranks, tracker, progress):
        policy_dir, drafter_dir = context.stage_dir / "policy", drafter_directory(context.stage_dir, trained)
        with logs.phase("copy of policy and drafter"):
            if ranks.is_first:
                link_files(trained.policy_dir, policy_dir)
                if trained.drafter_dir is not None and drafter_dir not in (None, policy_dir):
                    link_files(trained.drafter_dir, drafter_dir)
                if context.config.policy.lora is not None:
                    link_files(trained.policy_dir.parent / lora.FOLDER, context.stage_dir / lora.FOLDER)
            ranks.barrier()
        acceptance: list[Acceptance] = []
        if drafter_dir is not None:
            acceptance = try_out(context, policy_dir, drafter_dir, ranks, progress)
        acceptance_length = acceptance[0].acceptance_length if acceptance else None
        if ranks.is_first:
            result = ExportResult(
                policy_dir=policy_dir,
                drafter_dir=drafter_dir,
                vllm_acceptance_length=acceptance_length,
                acceptance=acceptance,
                seconds=time.monotonic() - started,
            )
            if drafter_dir is not None and acceptance_length is not None:
                publish(context, trained, result, drafter_dir)
                tracker.log_metrics({"export/vllm_acceptance_length": acceptance_length})
            register(context, trained, result, tracker)
            write_result(context.stage_dir, result.model_copy(update={"seconds": time.monotonic() - started}))


def drafter_directory(stage_dir: Path, trained: TrainResult) -> Path | None:
    """The folder of the exported drafter: the policy's for a multi-token-prediction layer, None without a drafter."""
    if trained.drafter_dir is None:
        return None
    return stage_dir / ("policy" if trained.drafter_dir == trained.policy_dir else "drafter")


def try_out(
    context: StageContext, policy_dir: Path, drafter_dir: Path, ranks: Ranks, progress: Progress
) -> list[Acceptance]:
    """Measure acceptance of the exported drafter in a fresh vLLM, on the first prompts of `validate`'s held-out sets.

    Drafts have full length.
    """
    config, own = context.config, drafter_dir == policy_dir  # vLLM then finds everything in the one directory
    talks = config.environment.name is not None
    rewards = start_rewards(config, ranks.rank, config.validate_.held_out_sets) if talks else None
    with logs.phase("start of the engine"):
        engine = start_engine(config, policy_dir, None if own else drafter_dir)
    engine.set_k(engine.longest_k)
    source = PromptSource(config, load_tokenizer(policy_dir), prompts_dir=context.prompts_dir)
    sets = [replace(chosen, prompts=chosen.prompts[:MOST_PROMPTS]) for chosen in held_out_sets(config, source)]
    with logs.phase("generation with the exported drafter"):
        on_progress = partial(progress.update, unit="measurement", phase="trying out the exported drafter")
        found = measure_acceptance(engine, sets, rewards, on_progress=on_progress)
    engine.shutdown()
    if rewards is not None:
        rewards.close()
    return found


def publish(context: StageContext, trained: TrainResult, exported: ExportResult, drafter_dir: Path) -> None:
    """Write the model card and, for EAGLE-3, the `speculators` format."""
    config, stage_dir = context.config, context.stage_dir
    policy_dir, k, place = stage_dir / "policy", config.speculation.k, context.run_dir / "export"
    validated = context.input("validate", ValidateResult)
    command = serve_command(place / "policy", place / drafter_dir.name, k, config, files=drafter_dir)
    write_text(drafter_dir / CARD_FILE, model_card(config, trained, validated, exported, command))
    if drafter_dir != policy_dir:
        drafter = ExportedDrafter(drafter_dir, policy_dir, str(place / "policy"), k)
        try:
            FORMATS["speculators"].write(drafter, stage_dir / "drafter-speculators")
        except ValueError as error:  # the format may not support a drafter from `drafter.source`
            logger.warning("no drafter-speculators: %s", error)


def register(context: StageContext, trained: TrainResult, exported: ExportResult, tracker: Tracker) -> None:
    """Register the policy and its drafter as model versions, with their lineage.

    The best validated policy, if it is another one, goes first, because MLflow calls the newest version `latest`.
    """
    name, best = context.config.name, trained.best
    lineage = lineage_tags(context)
    version, folder = str(trained.policy_step), str(exported.policy_dir)
    tags = {**lineage, "specrl.policy_version": version, "specrl.policy_dir": folder}
    if best is None:
        tags[SCORE_TAG] = str(context.input("validate", ValidateResult).accuracy_after)
    elif best.step == trained.policy_step:
        tags[SCORE_TAG] = str(best.value)
    else:
        found = {**lineage, "specrl.policy_version": str(best.step), SCORE_TAG: str(best.value)}
        tracker.register_model_version(f"{name}-policy", best.policy_dir, found, "best-policy")
        if best.drafter_dir is not None:
            tracker.register_model_version(f"{name}-drafter", best.drafter_dir, found, "best-drafter")
    tracker.register_model_version(f"{name}-policy", exported.policy_dir, tags)
    if exported.drafter_dir is not None:
        tags |= {"specrl.acceptance_length": f"{exported.vllm_acceptance_length:.3f}"}
        tracker.register_model_version(f"{name}-drafter", exported.drafter_dir, tags)


def lineage_tags(context: StageContext) -> dict[str, str]:
    """Tags for a model version's origin: run, stages, code, revision and data."""
    source = Log(context.run_dir).first_start().get("tags", {})
    kept = {name: value for name, value in source.items() if name.startswith(("specrl.", "mlflow.source.git."))}
    return {
        **kept,
        "specrl.run": context.config.name,
        "specrl.stage": context.key,
        "specrl.code": code_of(context.run_dir) or "",
        **{f"specrl.input.{stage}": folder.name for stage, folder in context.inputs.items()},
    }
