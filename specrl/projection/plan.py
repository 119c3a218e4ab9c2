"""The plan of a run before anything is submitted: jobs, memory of each rank, network traffic, and disk space.

`plan` reads only the configuration and the `config.json` of a local model; it needs neither torch nor a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specrl.config import Config, ConfigError, StageName, TrainConfig
from specrl.models.drafters import with_source_sizes
from specrl.models.shapes import ModelShape, model_shape
from specrl.projection.budgets import Budget, rank_of, stage_budgets
from specrl.projection.fit import Fit, what_fits
from specrl.projection.memory import GIB, MASTER_AND_MOMENTS, Rank, policy_state_bytes, stored_parameters
from specrl.projection.traffic import GB, HOST_GB_PER_S, Transfer, assumptions, step_traffic

BF16 = 2
SHAPING = ("loss_mean", "refill_rounds", "overlong_filter", "overlong_window", "entropy_coefficient")
OF_PENALTY = ("kl_coef", "kl_estimator", "kl_in", "reference_every")
OF_TEACHER = ("teacher", "teacher_coef")
"""Settings of `[train]` that, besides the functions, define the update; the last for a KL penalty or a teacher."""
OTHER_BYTES = GIB  # of rollouts, logs and reports


@dataclass(frozen=True)
class CheckpointPlan:
    """One checkpoint: FP32 masters and moments of the policy, and the current and best state of the drafter."""

    gib: float
    copy_s: float  # for which a step waits while the state is copied to host memory
    write_s: float  # to write it, during the next step
    number: int  # on disk at once, including the best one and one being written


@dataclass(frozen=True)
class Plan:
    config: Config
    shape: ModelShape
    budgets: tuple[Budget, ...]
    traffic: tuple[Transfer, ...]
    checkpoint: CheckpointPlan
    assumed: tuple[str, ...]  # about transfers and checkpoints
    algorithms: tuple[str, ...]  # with their options; also the handling of long prompts, and the reward
    notes: tuple[str, ...]  # about settings that work, but perhaps more slowly than intended


def plan(config: Config) -> Plan:
    """Plan a run.

    Raises:
        ConfigError: The model's shape is unknown or does not fit the configuration, or a rank needs more than it has;
            the message then names changes with which it would fit, if any are found.
    """
    config = with_source_sizes(config)
    shape = model_shape(config.model)
    fit = Fit.of(config, shape)
    if fit.misfits:
        advice = what_fits(config, shape, fit)
        raise ConfigError("\n".join([*fit.misfits, *([advice] if advice else [])]))
    trainer = rank_of(config, "train", shape)
    return Plan(
        config=config,
        shape=shape,
        budgets=tuple(fit.budgets),
        traffic=tuple(step_traffic(trainer)),
        checkpoint=checkpoint_plan(trainer),
        assumed=assumptions(config),
        algorithms=(
            f"data.overlong = {config.data.overlong}, for prompts of more than {config.max_prompt_tokens} tokens",
            f"environment.name = {config.environment.name}, for at most {config.environment.max_turns} turns"
            if config.environment.name is not None
            else f"data.reward = {config.data.reward_words}",
            *(f"{registry.key} = {algorithm}" for registry, algorithm in config.algorithms),
            *_shaping(config.train),
        ),
        notes=tuple(fit.notes),
    )


def _shaping(train: TrainConfig) -> Iterator[str]:
    taught = OF_TEACHER if train.teacher is not None else ()
    for name in (*SHAPING, *(OF_PENALTY if train.kl_coef else ()), *taught):
        if value := getattr(train, name):
            yield f"train.{name} = {value if isinstance(value, str | Path) else json.dumps(value)}"


def device_bytes(config: Config, stage: StageName) -> int:
    """Count what a rank needs on its GPU besides the engine; 0 without a GPU or if the shape is unknown."""
    try:
        shape = model_shape(config.model)
    except ConfigError:
        return 0
    budgets = stage_budgets(rank_of(config, stage, shape))
    return sum(round(budget.needed_gib * GIB) for budget in budgets if budget.place == "GPU, trainer")


def checkpoint_plan(rank: Rank) -> CheckpointPlan:
    width = policy_state_bytes(rank.config)
    has_drafter = rank.config.speculation.draft_method.has_weights
    drafter = 2 * rank.drafter_parameters * MASTER_AND_MOMENTS if has_drafter else 0
    size = stored_parameters(rank.config, rank.shape) * width + drafter
    copy_s = (rank.optimizer_parameters * width + drafter) / GB / HOST_GB_PER_S
    write_s = size / GB / rank.config.cluster.disk_gb_per_s
    return CheckpointPlan(size / GIB, copy_s, write_s, most_checkpoints(rank.config))


def most_checkpoints(config: Config) -> int:
    train = config.train
    number = train.keep_checkpoints + 1 + (1 if config.validate_.every else 0)
    return number + (train.num_steps // train.keep_every if train.keep_every else 0)


def disk_bytes(config: Config, shape: ModelShape | None) -> int:
    """Count the policies of three stages, all concurrent checkpoints, and 1 GiB; `shape` is None if unknown."""
    if shape is None:
        return OTHER_BYTES
    checkpoint = stored_parameters(config, shape) * policy_state_bytes(config)
    return shape.parameters * 3 * BF16 + most_checkpoints(config) * checkpoint + OTHER_BYTES
