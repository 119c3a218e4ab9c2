"""What a configuration would gain on GPUs from each number of drafts, from bubbles, and, to compare, from a lag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specrl.config import Config, ConfigError
from specrl.models.shapes import model_shape
from specrl.projection.refit import Layout
from specrl.projection.simulator.hardware import HARDWARE, Hardware
from specrl.projection.simulator.step import LONGEST_K, REPLAYED_TOKENS, Speculation, StepModel, StepTime
from specrl.projection.simulator.workload import Lengths, Workload

ACCEPTANCE = (0.88, 0.75, 0.64)
"""The share of drafts accepted at positions 1, 2, 3 where nothing was measured: an acceptance length of 3.3 at k = 3,
as published for an EAGLE-3 drafter that was trained on the task."""
MEDIAN_SHARE, SPREAD = 1 / 6, 0.9
"""The assumed median response length, as a share of the limit, and the standard deviation of its logarithm."""


@dataclass(frozen=True)
class Choice:
    """One way of generating, and what it takes."""

    name: str
    speculation: Speculation
    time: StepTime
    generation_speedup: float
    step_speedup: float


def acceptance_length(rates: Sequence[float], k: int) -> float:
    """Return the tokens of a request per iteration with k drafts.

    Args:
        rates: The share of drafts whose token at position 1, 2, ... is accepted. Beyond the last one the rates go on
            falling by the factor between the last two.
    """
    known = list(rates[:k])
    factor = rates[-1] / rates[-2] if len(rates) > 1 else rates[-1]
    while len(known) < k:
        known.append(known[-1] * factor)
    return 1 + sum(known)


def hardware_of(config: Config, name: str | None) -> Hardware:
    """Return the GPU of a name, or else the one whose memory is nearest to what the train stage asks for.

    Raises:
        ConfigError: The name is unknown, or the train stage asks for no GPU.
    """
    resources = config.resources_of("train")
    if not resources.gpus_per_rank:
        raise ConfigError("specrl project simulates GPUs: this configuration's train stage asks for none")
    if name is None:
        return min(HARDWARE.values(), key=lambda item: abs(item.memory_gb / 1.074 - resources.gpu_memory_gib))
    if name not in HARDWARE:
        raise ConfigError(f"--hardware {name}: allowed: {', '.join(HARDWARE)}")
    return HARDWARE[name]


def model_of(config: Config, hardware: Hardware, lengths: Lengths | None = None) -> StepModel:
    """Return the simulated run of a configuration.

    Args:
        lengths: The distribution of response lengths; by default one with a sixth of the limit as its median.
    """
    limit, policy = config.sampling.max_response_tokens, config.policy
    lengths = lengths or Lengths(limit * MEDIAN_SHARE, SPREAD, limit)
    resources = config.resources_of("train")
    parallel = config.drafter.parallel and config.speculation.draft_method.model == "drafter"
    return StepModel(
        shape=model_shape(config.model),
        hardware=hardware,
        gpus=resources.ranks,
        engine_gpus=config.engine.tensor_parallel,
        workload=Workload(config.train.prompts_per_step, config.train.samples_per_prompt, lengths),
        is_fp8=config.precision.generation == "fp8",
        parallel=parallel,
        longest_k=min(LONGEST_K, config.drafter.ttt_steps) if parallel else LONGEST_K,
        most_running=config.engine.max_num_seqs,
        logprob_passes=(config.train.updates_per_step > 1) + (config.train.kl_coef > 0),
        layout=Layout(policy.tensor_parallel, policy.pipeline_parallel, policy.expert_parallel),
    )


def choices(model: StepModel, rates: Sequence[float]) -> list[Choice]:
    """Return no speculation, every k up to the longest, the best k with bubbles, and the same with a lag of 1 and 2.

    Args:
        rates: As in `acceptance_length`.
    """
    plain = model.synchronous(Speculation())

    def choice(name: str, speculation: Speculation, time: StepTime) -> Choice:
        return Choice(name, speculation, time, plain.generation / time.generation, plain.total / time.total)

    found = [choice("plain", Speculation(), plain)]
    for k in range(1, model.longest_k + 1):
        speculation = Speculation(k, acceptance_length(rates, k))
        found.append(choice(f"k = {k}", speculation, model.synchronous(speculation)))
    best = min(found, key=lambda item: item.time.total).speculation
    for speculation in (Speculation(bubbles="pregenerate"), replace(best, bubbles="pregenerate")):
        name = f"k = {speculation.k}, bubbles" if speculation.k else "plain, bubbles"
        found.append(choice(name, speculation, model.synchronous(speculation)))
    if model.gpus >= 2 * model.engine_gpus:
        found += [choice(f"k = {best.k}, lag {lag} (not specrl)", best, model.lagged(best, lag)) for lag in (1, 2)]
    return found


CHOICE_COLUMNS = (
    "generation",
    ">length",
    ">generation, s",
    ">update, s",
    ">refit, s",
    ">step, s",
    ">generation speedup",
    ">step speedup",
    ">hours",
    ">GPU-hours",
)
"""The columns of `choice_cells`."""


def choice_cells(choice: Choice, gpus: int, num_steps: int) -> tuple[str, ...]:
    """Return the cells of a table's row: seconds of a step, speedups, and the hours of so many steps."""
    time, hours = choice.time, choice.time.total * num_steps / 3600
    return (
        choice.name,
        f"{choice.speculation.acceptance_length:.2f}",
        f"{time.generation:.1f}",
        f"{time.logprob + time.update:.1f}",
        f"{time.refit:.2f}",
        f"{time.total:.1f}",
        f"{choice.generation_speedup:.2f}",
        f"{choice.step_speedup:.2f}",
        f"{hours:.1f}",
        f"{hours * gpus:,.0f}",
    )


def assumptions(model: StepModel, rates: Sequence[float]) -> list[str]:
    """Return what the simulation of a configuration assumes, a line for each."""
    lengths, hardware = model.workload.lengths, model.hardware
    return [
        f"{model.workload.responses} responses a step, log-normal with a median of {lengths.median:.0f} tokens and a "
        f"spread of {lengths.spread:g}, at most {lengths.limit}; prompts of {model.prompt_tokens} tokens",
        f"drafts accepted at positions 1, 2, ...: {', '.join(f'{rate:g}' for rate in rates)}, falling on as at the end",
        *_of_parallel(model, rates),
        f"{REPLAYED_TOKENS:g} tokens an iteration along pre-generated text",
        f"{hardware.name}: {hardware.bf16_flops / 1e12:.0f} and {hardware.fp8_flops / 1e12:.0f} TFLOP/s in BF16 and "
        f"FP8, {hardware.memory_bandwidth / 1e12:g} TB/s, {hardware.link_bandwidth / 1e9:g} GB/s NVLink, "
        f"{hardware.network_bandwidth / 1e9:g} GB/s network ({hardware.source})",
        *model.efficiency.lines(),
        f"{model.other_s:g} s of a step for rewards, data and logging",
    ]


def _of_parallel(model: StepModel, rates: Sequence[float]) -> list[str]:
    """Return what is assumed of a drafter that drafts all positions in one pass, a line for each; none of any other."""
    if not model.parallel:
        return []
    lines = [
        f"all of a request's drafts come from one pass of the drafter, at most {model.longest_k} (drafter.ttt_steps); "
        "it reads weights and KV cache once, and computes as many positions as a pass for each draft would"
    ]
    if tuple(rates) == ACCEPTANCE:
        lines.append(
            "those shares were published for a drafter of one position after another; drafts of one pass are right "
            "less often: give the measured shares with --acceptance"
        )
    return lines
