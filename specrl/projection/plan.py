"""The plan of a run before anything is submitted: jobs, memory of each rank, network traffic, and disk space.

`plan` reads only the configuration and the `config.json` of a local model; it needs neither torch nor a GPU. If a run
does not fit its ranks, it finds by trial which changes would make it fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specrl.config import STAGES, Config, ConfigError, StageName, TrainConfig, change_config
from specrl.models.drafters import with_source_sizes
from specrl.models.layout import layout_problems
from specrl.models.shapes import ModelShape, model_shape
from specrl.projection.budgets import Budget, check_kv, overflow, rank_of, stage_budgets
from specrl.projection.memory import GIB, MASTER_AND_MOMENTS, Rank, policy_state_bytes, stored_parameters
from specrl.projection.traffic import GB, HOST_GB_PER_S, Transfer, assumptions, step_traffic

SHAPING = ("loss_mean", "refill_rounds", "overlong_filter", "overlong_window", "entropy_coefficient")
OF_PENALTY = ("kl_coef", "kl_estimator", "kl_in", "reference_every")
OF_TEACHER = ("teacher", "teacher_coef")
"""Settings of `[train]` that, besides the functions, define the update; the last for a KL penalty or a teacher."""
OTHER_BYTES = GIB  # of rollouts, logs and reports
MOST_CHANGES = 3  # settings that are changed together
GPU_FRACTIONS = tuple(step / 20 for step in range(4, 19))  # values of `engine.gpu_memory_fraction` to try


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
    train = rank.config.train
    number = train.keep_checkpoints + 1 + bool(rank.config.validate_.every)
    number += train.num_steps // train.keep_every if train.keep_every else 0
    return CheckpointPlan(size / GIB, copy_s, write_s, number)


def disk_bytes(config: Config, shape: ModelShape | None) -> int:
    """Count the policies of three stages, all concurrent checkpoints, and 1 GiB; `shape` is None if unknown."""
    if shape is None:
        return OTHER_BYTES
    rank = rank_of(with_source_sizes(config), "train", shape)
    checkpoint = checkpoint_plan(rank)
    return round(3 * shape.parameters * rank.dtype_bytes + checkpoint.number * checkpoint.gib * GIB) + OTHER_BYTES


@dataclass(frozen=True)
class Fit:
    budgets: list[Budget]
    small_caches: list[str]  # KV caches that do not hold a single sequence
    notes: list[str]

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> Fit:
        """Compute what the ranks need; ConfigError for a layout that the model cannot have with any memory."""
        if problems := list(layout_problems(config, shape)):
            raise ConfigError("\n".join(problems))
        ranks = [rank_of(config, stage, shape) for stage in STAGES]
        small_caches, notes = (list(filter(None, lines)) for lines in zip(*map(check_kv, ranks), strict=True))
        return cls([budget for rank in ranks for budget in stage_budgets(rank)], small_caches, notes)

    @property
    def lacking(self) -> list[Budget]:
        return [budget for budget in self.budgets if budget.needed_gib > budget.available_gib]

    @property
    def misfits(self) -> list[str]:
        return [*self.small_caches, *map(overflow, self.lacking)]

    @property
    def excess(self) -> float:
        missing = sum(budget.needed_gib / max(budget.available_gib, 1e-9) - 1 for budget in self.lacking)
        return len(self.small_caches) + missing


def what_fits(config: Config, shape: ModelShape, fit: Fit) -> str:
    """Name, in one line, changes with which the run would fit; empty if none are found.

    Greedy: the change that leaves the smallest deficit is chosen first, then the next, up to `MOST_CHANGES`.
    """
    chosen: dict[str, str] = {}
    while fit.excess and len(chosen) < MOST_CHANGES:
        tried = []
        for key, value in _changes(config, fit):
            with suppress(ConfigError):
                if key not in chosen:
                    changed = change_config(config, [f"{key}={value}"])
                    tried.append((key, value, changed, Fit.of(changed, shape)))
        best = min(tried, key=lambda found: found[-1].excess, default=None)
        if best is None or best[-1].excess >= fit.excess:
            return ""
        key, value, config, fit = best
        chosen[key] = value
    return "" if fit.excess else "this would fit: " + " ".join(f"--set {key}={value}" for key, value in chosen.items())


def _changes(config: Config, fit: Fit) -> Iterator[tuple[str, str]]:
    """Yield changes as keys and values, the cheapest first, because the first of equally good ones is chosen."""
    policy, engine = config.policy, config.engine
    if not policy.recompute:
        yield "policy.recompute", "true"
    if config.resources_of("train").gpus_per_rank:
        nearest = sorted(GPU_FRACTIONS, key=lambda value: abs(value - engine.gpu_memory_fraction))
        yield from (("engine.gpu_memory_fraction", f"{value:g}") for value in nearest)
        if not engine.sleep:
            yield "engine.sleep", "true"
    else:
        yield "engine.kv_cache_gib", f"{2 * engine.kv_cache_gib:g}"
    if policy.tokens_per_micro_batch > config.model.max_length:
        yield "policy.tokens_per_micro_batch", str(config.model.max_length)
    for factor in (2, 4, 8):
        yield "policy.tensor_parallel", str(policy.tensor_parallel * factor)
        yield "policy.expert_parallel", str(policy.expert_parallel * factor)
        yield "engine.tensor_parallel", str(engine.tensor_parallel * factor)
    for budget in fit.lacking:
        key = f"stage_resources.{budget.stage}"
        if budget.place == "host":
            yield f"{key}.memory_gib_per_rank", str(math.ceil(budget.needed_gib))
        nodes = config.resources_of(budget.stage).nodes
        yield from ((f"{key}.nodes", str(nodes * factor)) for factor in (2, 4, 8))
