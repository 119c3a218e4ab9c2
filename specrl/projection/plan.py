"""The plan of a run before anything is submitted: its jobs, the memory of each rank, and what travels and is stored.

`plan` reads only the configuration and the `config.json` of a local model; it needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specrl.config import STAGES, Config, ConfigError, StageName
from specrl.models.drafters import with_source_sizes
from specrl.models.shapes import ModelShape, model_shape
from specrl.projection.budgets import Budget, rank_of, stage_budgets
from specrl.projection.disk import CheckpointPlan, checkpoint_plan
from specrl.projection.fit import Fit, what_fits
from specrl.projection.memory import GIB
from specrl.projection.traffic import Transfer, assumptions, step_traffic


@dataclass(frozen=True)
class PlannedJob:
    """The job of one stage, with what all its nodes have together."""

    stage: StageName
    nodes: int
    ranks: int
    gpus: int
    cpus: int
    memory_gib: float | None  # of the host; None where the job does not ask for any
    minutes: int
    partition: str
    options: str  # with which it is submitted, in the scheduler's words


@dataclass(frozen=True)
class Plan:
    name: str
    model: str
    shape: ModelShape
    jobs: tuple[PlannedJob, ...]
    budgets: tuple[Budget, ...]
    traffic: tuple[Transfer, ...]
    checkpoint: CheckpointPlan
    assumed: tuple[str, ...]  # about transfers and checkpoints
    algorithms: tuple[str, ...]  # with their options; what becomes of long prompts, and the reward
    notes: tuple[str, ...]  # about what will run, but perhaps more slowly than intended


def plan(
    config: Config, queues: Mapping[StageName, str] | None = None, options: Mapping[StageName, str] | None = None
) -> Plan:
    """Plan a run; `queues` and `options` of each stage are in the scheduler's words.

    Raises:
        ConfigError: The model's shape is unknown or does not fit the configuration, or a rank needs more than it has;
            the message then ends with changes that would fit, if some are found.
    """
    config = with_source_sizes(config)
    shape = model_shape(config.model)
    fit = Fit.of(config, shape)
    if fit.misfits:
        advice = what_fits(config, shape)
        raise ConfigError("\n".join([*fit.misfits, *([advice] if advice else [])]))
    trainer = rank_of(config, "train", shape)
    return Plan(
        name=config.name,
        model=config.model.source,
        shape=shape,
        jobs=tuple(_job(config, stage, queues or {}, options or {}) for stage in STAGES),
        budgets=tuple(fit.budgets),
        traffic=tuple(step_traffic(trainer)),
        checkpoint=checkpoint_plan(trainer),
        assumed=assumptions(config),
        algorithms=(
            f"data.overlong = {config.data.overlong}, for prompts of more than {config.max_prompt_tokens} tokens",
            f"data.reward = {config.data.reward}",
            *(f"{registry.key} = {algorithm}" for registry, algorithm in config.algorithms),
        ),
        notes=tuple(fit.notes),
    )


def _job(
    config: Config, stage: StageName, queues: Mapping[StageName, str], options: Mapping[StageName, str]
) -> PlannedJob:
    asked, cluster = config.resources_of(stage), config.cluster_of(stage)
    return PlannedJob(
        stage=stage,
        nodes=asked.nodes,
        ranks=asked.ranks,
        gpus=asked.ranks * asked.gpus_per_rank,
        cpus=asked.ranks * asked.cpus_per_rank,
        memory_gib=asked.ranks * asked.memory_gib_per_rank if cluster.request_memory else None,
        minutes=asked.minutes,
        partition=queues.get(stage) or cluster.partition or "default",
        options=options.get(stage, ""),
    )


def device_bytes(config: Config, stage: StageName) -> int:
    """Count what a rank needs on its GPU beside the engine; 0 without a GPU, or where the shape is not known."""
    try:
        shape = model_shape(config.model)
    except ConfigError:
        return 0
    budgets = stage_budgets(stage, rank_of(config, stage, shape))
    return sum(round(budget.needed_gib * GIB) for budget in budgets if budget.place == "GPU, trainer")
