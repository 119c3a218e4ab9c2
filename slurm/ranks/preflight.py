"""Look at a rank's GPU in the first seconds of its job, before any model is loaded."""

from __future__ import annotations

import logging

from slurm.backend import StageRequest
from specrl.checks import Check
from specrl.checks.gpu import GIB, GpuNeeds, gather_facts, gpu_checks
from specrl.config import Config, StageName

logger = logging.getLogger(__name__)

MEGATRON_STAGES: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate", "train")
"""The stages whose jobs compute with Megatron."""
ENGINE_STAGES: tuple[StageName, ...] = ("pretrain", "train", "validate", "export")
"""The stages whose jobs start an engine."""


class PreflightError(RuntimeError):
    """This machine's GPU cannot do what the stage asks of it; the message has a line for each reason."""


def check_rank(request: StageRequest) -> None:
    """Check the GPU of this rank, if its stage has one; a PreflightError says that the stage would fail later."""
    config, stage = request.context.config, request.context.stage
    if not config.resources_of(stage).gpus_per_rank or not request.entry.startswith("specrl.stages."):
        return  # what another function needs is not known
    found = gpu_checks(gather_facts(use_torch=True), needs_of(config, stage, request.context.device_bytes))
    for check in found:
        if check.status == "warn":
            logger.warning("%s", line_of(check))
    failed = [line_of(check) for check in found if check.status == "fail"]
    if failed:
        raise PreflightError("\n".join(failed))


def line_of(check: Check) -> str:
    """A finding as one line: what was found, and what mends it."""
    return f"{check.name}: {check.found}; {check.fix}" if check.fix else f"{check.name}: {check.found}"


def needs_of(config: Config, stage: StageName, planned_bytes: int) -> GpuNeeds:
    """Say what a stage asks of the GPU of each of its ranks, for which the plan counts so many bytes."""
    resources = config.resources_of(stage)
    has_engine = stage in ENGINE_STAGES
    return GpuNeeds(
        engine_fraction=config.engine.gpu_memory_fraction if has_engine else 0.0,
        planned_gib=planned_bytes / GIB,
        given_gib=resources.gpu_memory_gib,
        transformer_engine=stage in MEGATRON_STAGES,
        fp8_generation=has_engine and stage != "pretrain" and config.precision.generation == "fp8",
        several_ranks=resources.ranks > 1,
    )
