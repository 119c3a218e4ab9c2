"""How much of a drafter's drafts is accepted on held-out prompts, by data set, temperature and context length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specrl.artifacts import Acceptance
from specrl.data.problems import derive_seed
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.drafts.acceptance import SpeculationStats, VerifiedDraft, by_context
from specrl.rollout.engine import Engine
from specrl.validation.answering import HeldOutSet

GREEDY = 0.0


def measure_acceptance(
    engine: Engine, sets: Sequence[HeldOutSet], on_progress: Callable[[int, int], None] | None = None
) -> list[Acceptance]:
    """The acceptance on each set, at its own temperature first and then greedily, in all and by context length.

    Each prompt is answered once, with the seed that validation gives its first response.
    """
    asked = [
        (chosen, temperature)
        for chosen in sets
        for temperature in dict.fromkeys((chosen.config.sampling.temperature, GREEDY))
    ]
    found = []
    for index, (chosen, temperature) in enumerate(asked):
        if on_progress is not None:
            on_progress(index, len(asked))
        drafts = _drafts(engine, chosen, temperature)
        found.append(_row(chosen.name, temperature, None, SpeculationStats.of(drafts)))
        found += [_row(chosen.name, temperature, ends, stats) for ends, stats in by_context(drafts).items()]
    return found


def _drafts(engine: Engine, chosen: HeldOutSet, temperature: float) -> list[VerifiedDraft]:
    origin = Origin(derive_seed(chosen.config.seed, "validate"), step=0)
    requests = [make_request(prompt, 0, chosen.config, origin) for prompt in chosen.prompts]
    generation = engine.generate([replace(request, temperature=temperature) for request in requests])
    return [draft for response in generation.responses for draft in response.drafts]


def _row(name: str, temperature: float, context: tuple[int, int] | None, stats: SpeculationStats) -> Acceptance:
    return Acceptance(
        set=name,
        temperature=temperature,
        context=context,
        num_drafts=stats.num_drafts,
        acceptance_length=stats.acceptance_length,
        acceptance_rate_per_pos=list(stats.acceptance_rate_per_pos),
    )
