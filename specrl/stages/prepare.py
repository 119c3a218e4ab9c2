"""Stage `prepare`: writes the policy as a Hugging Face directory, warm-started if configured."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import torch

from specrl import logs
from specrl.artifacts import PrepareResult, write_result
from specrl.context import StageContext
from specrl.data.check import check_sandbox
from specrl.data.drawing import draw_first
from specrl.data.prompts import PromptSource
from specrl.data.rewards.environments import check_scoring
from specrl.data.rewards.functions import is_built_in
from specrl.data.rewards.trial import doubtful_references
from specrl.distributed import Ranks
from specrl.events import record_event
from specrl.models.drafters import check_drafter, fetch_source
from specrl.models.layout import check_teacher
from specrl.models.sources import check_model_fits_method, load_tokenizer, materialise_model
from specrl.progress import Progress
from specrl.stages.rank import stage_rank
from specrl.tracking.tracker import Tracker
from specrl.training.checkpoint.policy_folder import write_policy_folder

logger = logging.getLogger(__name__)

REFERENCES = 1000
"""The most references that a built-in reward scores against themselves."""
OWN_REFERENCES = 100
"""The same for a user's reward, or one that may ask a judge."""


def main(context: StageContext) -> None:
    started = time.monotonic()
    config, start = context.config, context.continues
    check_scoring(config)
    check_sandbox(config)
    warm = config.warm_start.num_examples > 0
    policy_dir = context.stage_dir / "policy"
    base_dir = context.stage_dir / "base" if warm or start is not None else policy_dir
    with stage_rank(context) as (ranks, tracker, progress):
        progress.update(0, 1, phase="writing of the base model")
        with logs.phase("writing of the base model"):
            if ranks.is_first:
                check_model_fits_method(config, materialise_model(config.model, config.seed, base_dir))
                check_teacher(config, base_dir)
            ranks.barrier()
        source = PromptSource(config, load_tokenizer(base_dir), prompts_dir=context.prompts_dir)
        with logs.phase("drawing of the first problems"):
            draw_first(source, config, base_dir, (ranks.rank, ranks.world_size))
            ranks.barrier()
        found = source.check()
        if ranks.is_first and config.data.source == "file" and config.environment.name is None:
            count = OWN_REFERENCES if config.data.reward_network or not is_built_in(config.data) else REFERENCES
            found.notes.extend(doubtful_references(config, source.demonstrations(count)))
        for line in found.notes if ranks.is_first else []:
            logger.warning(line)
            record_event(context.stage_dir, "data", line)
        tracker.log_params({"data_prompts_seen": found.seen, "data_prompts_overlong": found.overlong})
        if start is not None:
            with logs.phase("writing of the checkpoint's policy"):
                dtype = getattr(torch, config.model.dtype)
                write_policy_folder(start.checkpoint_dir, base_dir, policy_dir, dtype, ranks)
        elif warm:
            with logs.phase("warm start"):
                _warm_start(context, ranks, source, tracker, progress, base_dir)
        if ranks.is_first and base_dir != policy_dir:
            shutil.rmtree(base_dir)
        drafter_dir = _adopt_drafter(context, ranks, policy_dir)
        if ranks.is_first:
            result = PrepareResult(
                policy_dir=policy_dir,
                prompts_seen=found.seen,
                prompts_overlong=found.overlong,
                drafter_dir=drafter_dir,
                seconds=time.monotonic() - started,
            )
            write_result(context.stage_dir, result)


def _adopt_drafter(context: StageContext, ranks: Ranks, policy_dir: Path) -> Path | None:
    """Write the drafter of `drafter.source` in specrl's layout; return its folder, or raise ValueError."""
    start = context.continues
    if not context.config.adopts_drafter or (start is not None and start.has_drafter):
        return None
    directory = context.stage_dir / "drafter"
    if ranks.is_first:
        # Imported here: it needs torch and transformers' models, and most runs have no such drafter.
        from specrl.training.drafter.io import adopt_drafter

        with logs.phase("reading of the drafter"):
            source = fetch_source(context.config)
            check_drafter(source, policy_dir)
            for line in adopt_drafter(source, policy_dir, directory):
                logger.info("drafter.source: %s", line)
                record_event(context.stage_dir, "drafter", line)
    return directory


def _warm_start(
    context: StageContext, ranks: Ranks, source: PromptSource, tracker: Tracker, progress: Progress, base_dir: Path
) -> None:
    """Train the base model on demonstrations and write it (collective)."""
    # Imported here: Megatron is slow to import, and only a warm start needs it.
    from specrl.training.megatron.policy import Policy
    from specrl.training.warm_start import warm_start

    config = context.config
    policy = Policy(base_dir, config.policy, dtype=config.model.dtype, ranks=ranks, seed=config.seed)

    def on_step(step: int, steps: int, metrics: dict[str, float]) -> None:
        progress.update(step + 1, steps, message=f"loss {metrics['loss']:.3f}", unit="step", phase="warm start")
        tracker.log_metrics({f"warm_start/{name}": value for name, value in metrics.items()}, step)

    warm_start(policy, source, config, on_step)
    policy.save_pretrained(context.stage_dir / "policy")
    ranks.barrier()
