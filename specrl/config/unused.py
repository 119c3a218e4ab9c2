"""Settings that would have no effect alongside the others, each with the line that refuses it.

Validators of sections do not look for them, because a run may acquire some: `drafter.source` stays when
`speculation.method` changes. Stored configurations must load, so only a user's input is refused. A value counts as
given if it differs from the default, since a resolved configuration contains every field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specrl.config.algorithms import LOSSES, PRESETS
from specrl.config.base import Section
from specrl.config.methods import METHODS
from specrl.config.model import DataConfig, EnvironmentConfig
from specrl.config.rollout import SpeculationConfig
from specrl.config.training import DrafterConfig, TrainConfig
from specrl.config.validation import ValidateConfig, suggest_metric
from specrl.metrics import METRICS, POLICY, find_metric


def unused_drafting(speculation: SpeculationConfig, drafter: DrafterConfig) -> Iterator[str]:
    """Yield the settings for drafts that `speculation.method` does not produce.

    The drafter's sizes and training are exempt, because the same file is also run with other methods as a baseline. The
    drafter's source and data are not: nobody sets them without purpose.
    """
    method, chosen = speculation.draft_method, f'with speculation.method = "{speculation.method}"'
    if method.drafts and method.vllm is None and _is_given(speculation, "k"):
        yield (
            f"speculation.k = {speculation.k} {chosen}: it drafts from text alone, up to speculation.replay_k tokens; "
            f"leave k at {_default(speculation, 'k')}"
        )
    rows = METHODS.values()
    drafters = [row.name for row in rows if row.model == "drafter"], [row.name for row in rows if row.has_weights]
    for name, allowed in (("source", drafters[0]), ("data", drafters[1])):
        if not method.has_weights and _is_given(drafter, name):
            yield (
                f"drafter.{name} = {_words(getattr(drafter, name))} {chosen}: no drafter is trained; leave it out, or "
                f"set the method to one of {', '.join(allowed)}"
            )


def unused_data(data: DataConfig, validate: ValidateConfig, drafter: DrafterConfig) -> Iterator[str]:
    if data.chat_template_kwargs and data.template != "chat" and drafter.data is None:
        yield (
            f"data.chat_template_kwargs = {_words(data.chat_template_kwargs)} with data.template = "
            f'{_words(data.template)}: no chat template is used; leave it out, or take "chat"'
        )
    if data.num_problems is not None and data.source == "file":
        yield (
            f'data.num_problems = {data.num_problems} with data.source = "file": a file has its own number; leave it '
            "out"
        )
    path = f"data.validation_path = {_words(data.validation_path)}"
    if data.validation_path is not None and data.source != "file":
        yield (
            f'{path} with data.source = "{data.source}": problems of generators are held out by '
            'data.validation_fraction; the path is allowed with data.source = "file" alone (or as that of a set in '
            "validate.sets)"
        )
    elif (
        data.validation_path is not None
        and _is_given(data, "validation_fraction")
        and not any(chosen.generators for chosen in validate.sets.values())  # these hold out by fraction
    ):
        yield (
            f"data.validation_fraction = {data.validation_fraction:g} beside {path}: that file alone is held out; "
            "leave one of the two out"
        )


def unused_reward(data: DataConfig, validate: ValidateConfig, environment: EnvironmentConfig) -> Iterator[str]:
    """Yield rewards that an environment replaces, and the number of turns without an environment."""
    if environment.name is None and _is_given(environment, "max_turns"):
        yield (
            f"environment.max_turns = {environment.max_turns} without environment.name: a response is one turn; leave "
            "it out, or name an environment"
        )
    given = {f"validate.sets.{name}.reward": chosen.reward for name, chosen in validate.sets.items()}
    given["data.reward"] = data.reward if _is_given(data, "reward") else None
    for key, reward in given.items() if environment.name is not None else ():
        if reward is not None:
            yield (
                f'{key} = {_words(reward)} with environment.name = "{environment.name}": the environment rewards each '
                "turn; leave one of the two out"
            )


def unused_training(train: TrainConfig) -> Iterator[str]:
    """Yield the settings of the RL steps that would never have an effect."""
    every, step = train.keep_every, train.checkpoint_every
    if every is not None and every % step and step % every:
        yield (
            f"train.keep_every = {every} with train.checkpoint_every = {step}: step {every} writes no checkpoint that "
            f"could be kept; keep_every must be a multiple of {step}, or 1 to keep all"
        )
    yield from _clips_nothing(train)
    yield from _penalises_nothing(train)
    yield from _teaches_nothing(train)
    if train.stop_when is not None:
        yield from _is_never_measured(train, train.stop_when.metric)


def _clips_nothing(train: TrainConfig) -> Iterator[str]:
    """Yield the settings for ratios that are always 1, because a step's only update trains the policy that sampled."""
    loss, defaults = train.loss, LOSSES.default().options
    why = "with train.updates_per_step = 1: the ratio p / p_old is 1, and nothing is clipped"
    if train.updates_per_step > 1:
        return
    if loss.name in ("gspo", "cispo"):
        yield f'train.loss = "{loss.name}" {why}; take "grpo", or raise train.updates_per_step'
    for name, value in loss.options.items() if loss.name == "grpo" else ():
        if value != defaults[name]:
            yield f"train.loss.{name} = {value:g} {why}; leave it at {defaults[name]:g}, or raise that"


def _penalises_nothing(train: TrainConfig) -> Iterator[str]:
    """Yield the settings of an absent KL penalty, or of one that only adds noise."""
    for name in ("kl_estimator", "kl_in", "reference_every") if not train.kl_coef else ():
        if _is_given(train, name):
            line = f"train.{name} = {_words(getattr(train, name))} with train.kl_coef = 0: nothing is penalised; "
            yield line + "leave it out, or set kl_coef above 0"
    if train.penalises_tokens and train.kl_estimator == "k1":
        line = 'train.kl_estimator = "k1" with train.kl_in = "loss": its gradient is 0 on average, and noise is left; '
        yield line + 'take "k2" or "k3", or train.kl_in = "reward"'


def _teaches_nothing(train: TrainConfig) -> Iterator[str]:
    """Yield the settings of an absent teacher, and those that act through rewards that are not learned from."""
    if train.teacher is None and _is_given(train, "teacher_coef"):
        line = f"train.teacher_coef = {train.teacher_coef:g} without train.teacher: there is no teacher; "
        yield line + "leave it out, or name a teacher"
    if train.teacher is not None and train.loss.name == "gspo":
        line = 'train.loss = "gspo" with train.teacher: one ratio for a response averages what the teacher '
        yield line + 'says of each token; take "grpo" or "cispo"'
    if train.advantage.name != "none":
        return
    if train.teacher is None:
        yield 'train.advantage = "none" without train.teacher: nothing is learned; name a teacher, or take "grpo"'
    for name in ("refill_rounds", "overlong_window"):
        if _is_given(train, name):
            line = f'train.{name} = {_words(getattr(train, name))} with train.advantage = "none": '
            line += "no reward is learned from; set 0 or leave it out, or take another advantage"
            if getattr(train, name) == PRESETS["dapo"][name]:
                line += '; train.algorithm = "dapo" sets it: give its other settings one by one'
            yield line
    if train.kl_coef and train.kl_in == "reward":
        yield 'train.kl_in = "reward" with train.advantage = "none": no reward is learned from; take "loss"'


def _is_never_measured(train: TrainConfig, metric: str) -> Iterator[str]:
    """Yield why no step measures a metric; names created at run time are accepted unless all are known."""
    if metric in METRICS and metric.endswith("_I"):
        yield f'train.stop_when.metric = "{metric}": I stands for a number, as in {metric.removesuffix("I")}1'
    if metric == "policy/teacher_kl" and train.teacher is None:
        yield f'train.stop_when.metric = "{metric}" without train.teacher: it is not measured; name a teacher'
    names = LOSSES.find(train.loss.name).metrics if find_metric(metric) is POLICY else None
    if names is not None and metric.removeprefix("policy/") not in names:
        near = suggest_metric(metric, [f"policy/{name}" for name in names])
        line = f'train.stop_when.metric = "{metric}": neither specrl/metrics.py nor train.loss = {train.loss.name} has '
        yield f"{line}a metric of this name{near}"


def _is_given(section: Section, name: str) -> bool:
    return bool(getattr(section, name) != _default(section, name))


def _default(section: Section, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True)


def _words(value: Any) -> str:
    value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    return json.dumps(value, default=str)
