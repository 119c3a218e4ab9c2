"""The gain of a configuration on GPUs from each draft length and each use of idle time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from specrl.config import Config, ConfigError
from specrl.config.rollout import BubbleUse
from specrl.models.shapes import model_shape, teacher_shape
from specrl.projection.simulator.engine import HARDWARE, EngineModel, Hardware
from specrl.projection.simulator.step import (
    AGREES,
    Lengths,
    Responses,
    Speculation,
    StepModel,
    StepTime,
    Workload,
    acceptance_length,
)

ACCEPTANCE = (0.88, 0.75, 0.64)
"""The share of drafts accepted at positions 1, 2, 3 where nothing was measured: an acceptance length of 3.3 at k = 3,
as published for an EAGLE-3 drafter that was trained on the task."""
MEDIAN_SHARE, SPREAD = 1 / 6, 0.9  # of response lengths: median as a share of the limit; spread of the logarithm
LONGEST_K = 7  # the longest simulated draft
MEASURED_K = 3
"""The longest draft at which the simulator agrees with measurements. Beyond it, the simulator predicts gains where
losses were published (`published.py`), so no advice relies on it."""


@dataclass(frozen=True)
class Choice:
    name: str
    speculation: Speculation
    time: StepTime
    generation_speedup: float
    step_speedup: float


def hardware_of(config: Config, name: str | None) -> Hardware:
    """Find a GPU by name, or else the one whose memory is closest to what the train stage asks for."""
    resources = config.resources_of("train")
    if name is None and not resources.gpus_per_rank:
        raise ConfigError(
            "specrl project simulates GPUs: the train stage asks for none; name one with --hardware, --gpus"
        )
    if name is None:
        return min(HARDWARE.values(), key=lambda item: abs(item.memory_gb / 1.074 - resources.gpu_memory_gib))
    if name not in HARDWARE:
        raise ConfigError(f"--hardware {name}: allowed: {', '.join(HARDWARE)}")
    return HARDWARE[name]


def model_of(
    config: Config, hardware: Hardware, responses: Responses | None = None, gpus: int | None = None
) -> StepModel:
    """Simulate the run of a configuration, by default with log-normal lengths and the train stage's ranks."""
    limit, policy = config.sampling.max_response_tokens, config.policy
    gpus = gpus or config.resources_of("train").ranks
    if gpus % config.engine.tensor_parallel:
        raise ConfigError(
            f"--gpus {gpus}: allowed: multiples of engine.tensor_parallel = {config.engine.tensor_parallel}"
        )
    shape, teacher = model_shape(config.model), teacher_shape(config)
    taught = teacher.active_parameters / shape.active_parameters if teacher is not None else 0.0
    drafter, method = config.drafter, config.speculation.draft_method
    engine = EngineModel(
        shape=shape,
        hardware=hardware,
        gpus=config.engine.tensor_parallel,
        is_fp8=config.precision.generation == "fp8",
        draft_vocab_size=shape.vocab_size if method.is_policy_layer else drafter.draft_vocab_size,
    )
    responses = responses or Lengths(limit * MEDIAN_SHARE, SPREAD, limit)
    copies = gpus / (policy.tensor_parallel * policy.pipeline_parallel)
    learns = method.has_weights and drafter.online_lr > 0
    return StepModel(
        engine=engine,
        gpus=gpus,
        workload=Workload(
            config.train.prompts_per_step, config.train.samples_per_prompt, responses, config.whole_groups
        ),
        most_running=config.engine.max_num_seqs,
        logprob_passes=(config.train.updates_per_step > 1) + (config.train.kl_coef > 0) + taught,
        policy=policy,
        drafter_tokens=learns * copies * drafter.max_tokens_per_step,
        drafter_updates=1 / drafter.update_every,
        ttt_steps=drafter.ttt_steps,
    )


def choices(model: StepModel, rates: Sequence[float]) -> list[Choice]:
    """Simulate every k, and each use of idle time without drafts and with the best k."""
    plain = model.step(Speculation())

    def choice(name: str, speculation: Speculation) -> Choice:
        time = model.step(speculation)
        return Choice(name, speculation, time, plain.generation / time.generation, plain.total / time.total)

    drafting = [Speculation(k, acceptance_length(rates, k)) for k in range(1, LONGEST_K + 1)]
    found = [choice("plain", Speculation()), *(choice(f"k = {item.k}", item) for item in drafting)]
    best = min(found[1 : MEASURED_K + 1], key=lambda item: item.time.total)
    for base in (found[0], best):
        uses = [replace(base.speculation, bubbles=use) for use in get_args(BubbleUse) if use != "none"]
        found += [choice(f"{base.name}, {item.bubbles}", item) for item in uses]
    return found


def ideas(
    model: StepModel, rates: Sequence[float]
) -> tuple[dict[str, StepTime], dict[str, StepTime], dict[str, StepTime]]:
    """Simulate steps with none of specrl's ideas, with each of them alone, and with all together."""
    none, drafts = Speculation(), Speculation(MEASURED_K, acceptance_length(rates, MEASURED_K))

    def step(speculation: Speculation = none, *, is_fp8: bool = False, whole_groups: bool = True) -> StepTime:
        workload, engine = replace(model.workload, whole_groups=whole_groups), replace(model.engine, is_fp8=is_fp8)
        return replace(model, workload=workload, engine=engine).step(speculation)

    alone = {
        f"drafts of {MEASURED_K} tokens": step(drafts),
        "FP8 in generation": step(is_fp8=True),
        "text generated ahead in idle time": step(Speculation(bubbles="pregenerate")),
        "responses dealt to engines in turn": step(whole_groups=False),
    }
    everything = replace(drafts, bubbles="both")
    together = {"all but FP8": step(everything, whole_groups=False)}
    together["all"] = step(everything, is_fp8=True, whole_groups=False)
    return {"none: BF16, no drafts, whole groups": step()}, alone, together


def assumptions(model: StepModel, rates: Sequence[float]) -> list[str]:
    responses, learned = model.workload.prompts * model.workload.samples, model.drafter_tokens
    return [
        f"{responses} responses a step, {model.workload.lengths}; prompts of {model.engine.prompt_tokens} tokens",
        f"drafts accepted at positions 1, 2, ...: {', '.join(f'{rate:.2g}' for rate in rates)}, extrapolated beyond",
        f"idle time is simulated with the best k up to {MEASURED_K}: for longer drafts, it predicts more than "
        "was measured (--published)",
        "with whole groups, one engine generates all responses to a prompt, as in most other systems",
        "FP8 in generation reaches the same fraction of its peak as BF16 does, and updates are in BF16",
        "each drafted position takes one pass of the drafter",
        f"a response agrees with its pre-generated text for {AGREES:g} tokens",
        *([f"an update of the drafter learns from at most {learned:,.0f} tokens"] if learned else []),
        "training the drafter does not improve its drafts",
        str(model.engine.hardware),
        *model.engine.efficiency.lines(),
        f"{model.other_s:g} s of a step for rewards, data and logging; the KV cache always holds all running responses",
    ]
