"""The answers of an engine's policy to the held-out sets, by all ranks together, and the drafts accepted on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from specrl import logs
from specrl.artifacts import Acceptance, SetScore
from specrl.config import Config, ValidationSetConfig
from specrl.data.held_out import config_of_set
from specrl.data.problems import Prompt, derive_seed
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import FailureTally, RewardPool, refuse_failure
from specrl.distributed import Ranks
from specrl.rollout.bubbles.pregeneration import store_texts
from specrl.rollout.bubbles.texts import PregeneratedText, read_texts, write_texts
from specrl.rollout.collect import Origin, collect, make_request
from specrl.rollout.conversations import open_conversations
from specrl.rollout.drafts.acceptance import SpeculationStats, VerifiedDraft
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout
from specrl.training.rollouts import RolloutBatch
from specrl.validation.scores import SetResponses, score_set

SHORTEST = 16  # tokens: the upper end of the first range of lengths; each further range is as long as all before it


@dataclass(frozen=True)
class HeldOutSet:
    name: str
    config: Config  # under which it is answered, see `config_of_set`
    prompts: list[Prompt]
    settings: ValidationSetConfig


def held_out_sets(config: Config, source: PromptSource) -> list[HeldOutSet]:
    """The sets of `validate.sets` in their order; raise ConfigError if one is wrong or has too few problems."""
    sets = config.validate_.held_out_sets.items()
    return [HeldOutSet(name, config_of_set(config, name), source.validation(name), chosen) for name, chosen in sets]


def answer(
    engine: Engine,
    rewards: RewardPool | None,
    chosen: HeldOutSet,
    step: int,
    ranks: Ranks,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    learn: bool = True,
    last: LastAnswers | None = None,
) -> tuple[SetScore, SpeculationStats]:
    """Answer a held-out set with the policy in the engine; return its scores and the counters of drafts (collective).

    The seeds are validation's own and the same for every policy, so that versions are compared on equal terms. `last`
    holds the responses of the last validation, to draft from, and then these.
    """
    started = time.monotonic()
    size, samples = chosen.config.engine.tensor_parallel, chosen.settings.samples_per_prompt
    share = chosen.prompts[ranks.rank // size :: ranks.world_size // size]
    own = open_conversations(engine, share, chosen.config, rewards)
    origin = Origin(derive_seed(chosen.config.seed, "validate"), step=0, rank=ranks.rank)
    with logs.phase(f"answers to {chosen.name}"), last.drafted(chosen.name, own) if last else nullcontext():
        unscored = collect(engine, own, samples, chosen.config, rewards, origin, on_progress=on_progress, learn=learn)
        rollouts, scores = unscored.scored()
    if last is not None:
        last.keep(chosen.name, rollouts)
    places = {prompt.id: place for place, prompt in enumerate(chosen.prompts)}
    everyone = RolloutBatch.gather(ranks, rollouts, engine_size=size, prompt_places=places)
    shape = len(places), samples
    lengths, truncated = everyone.response_lengths.reshape(shape), everyone.truncated.reshape(shape)
    responses = SetResponses(everyone.rewards.reshape(shape), lengths, truncated)
    engines = ranks.gather((unscored.generation.stats, FailureTally.of(scores.failures)))[::size]
    failures = FailureTally.merge(failures for _, failures in engines)
    refuse_failure(failures, responses.rewards.size, chosen.config.data, chosen.config.environment.name)
    seconds = time.monotonic() - started
    correct_reward = chosen.config.validate_.correct_reward
    stats = SpeculationStats.merge(stats for stats, _ in engines)
    saved = stats.num_accepted_tokens / responses.lengths.sum()
    sizes = chosen.settings.pass_sizes
    return score_set(step, chosen.name, responses, sizes, correct_reward, seconds, 1 - saved), stats


def measure_acceptance(
    engine: Engine,
    sets: Sequence[HeldOutSet],
    rewards: RewardPool | None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Acceptance]:
    """The acceptance on each set, at its own temperature first and then greedily, in all and by context length.

    With an environment it is that of first turns (collective over the engine).
    """
    asked = [
        (replace(chosen, prompts=open_conversations(engine, chosen.prompts, chosen.config, rewards)), temperature)
        for chosen in sets
        for temperature in dict.fromkeys((chosen.config.sampling.temperature, 0.0))
    ]
    found = []
    for index, (chosen, temperature) in enumerate(asked):
        if on_progress is not None:
            on_progress(index, len(asked))
        drafts = _drafts(engine, chosen, temperature)
        found.append(_row(chosen.name, temperature, None, SpeculationStats.of(drafts)))
        found += [_row(chosen.name, temperature, ends, stats) for ends, stats in by_context(drafts).items()]
    return found


def by_context(drafts: Iterable[VerifiedDraft]) -> dict[tuple[int, int], SpeculationStats]:
    """Count drafts by the first and the last length of the range that their context lies in, the shortest first."""
    found: dict[tuple[int, int], list[VerifiedDraft]] = {}
    for draft in drafts:
        found.setdefault(length_range(draft.context), []).append(draft)
    return {ends: SpeculationStats.of(found[ends]) for ends in sorted(found)}


def length_range(length: int) -> tuple[int, int]:
    """The range that a length lies in: 0 to 15, 16 to 31, 32 to 63, ..."""
    if length < SHORTEST:
        return 0, SHORTEST - 1
    first = 1 << (length.bit_length() - 1)
    return first, 2 * first - 1


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


FOLDER = "last_answers"


class LastAnswers:
    """Keeps the newest responses of this rank's engine to each held-out set, in memory and on disk.

    With the same seeds an updated policy samples nearly the same text. Responses are drafts and nothing else: a missing
    file, or one of another policy, changes no token.
    """

    def __init__(self, engine: Engine, folder: Path, rank: int) -> None:
        self._engine, self._folder, self._rank = engine, folder, rank
        self._texts: dict[str, list[PregeneratedText]] = {}

    @contextmanager
    def drafted(self, name: str, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Draft from the last responses to these prompts of the set `name`, if the method drafts from stored text."""
        if not self._engine.replays:
            yield
            return
        if name not in self._texts:
            self._texts[name] = self._read(name)
        store_texts(self._engine, prompts, self._texts[name])
        try:
            yield
        finally:
            self._engine.set_replay({})

    def keep(self, name: str, rollouts: Sequence[Rollout]) -> None:
        if not self._engine.replays:
            return
        texts = [PregeneratedText(rollout.prompt_id, rollout.seed, [*rollout.response_tokens]) for rollout in rollouts]
        self._texts[name] = texts
        if self._engine.is_first:
            write_texts(self._folder / f"{name}-{self._rank:04d}.arrow", texts)

    def _read(self, name: str) -> list[PregeneratedText]:
        # A restart may have another number of ranks, which deals the prompts in another way.
        paths = sorted(self._folder.glob(f"{name}-????.arrow"))
        return [text for path in paths for text in read_texts(path)]
