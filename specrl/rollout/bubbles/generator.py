"""The rollouts of a step over all ranks: responses are dealt, generated and scored; idle ranks use the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import FailureTally, RewardPool, Scores, refuse_failure
from specrl.distributed import Ranks
from specrl.rollout.bubbles.coordinator import Activity, BubbleCoordinator, EngineRank, put_to_use
from specrl.rollout.bubbles.pregeneration import Pregeneration, store_texts
from specrl.rollout.bubbles.texts import MOST_DELIVERED, EarlierResponses, PregeneratedText, deliver_texts
from specrl.rollout.collect import Asked, Origin, Unscored, collect, deal, open_asked
from specrl.rollout.drafts.acceptance import SpeculationStats, over_engines
from specrl.rollout.engine import Engine, Generation, response_seed
from specrl.schemas import Rollout
from specrl.timeline import GENERATION, SPOT_TRAINING, Bubble, Span, joined
from specrl.training.rollouts import RolloutBatch


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of all ranks in one step; only the rollouts that a rank holds differ between ranks."""

    rollouts: RolloutBatch
    """With rewards and advantages, in the order of the step's prompts and, within each, of its samples."""
    stats: SpeculationStats
    """See `over_engines`."""
    bubbles: list[Bubble]
    """In rank order."""
    failures: FailureTally
    metrics: dict[str, float]
    """What the rewards cost, and what dynamic sampling, the punishment of length and an environment have made of them,
    by the names in MLflow."""


@dataclass(frozen=True)
class _Counters:
    stats: SpeculationStats
    bubble: Bubble
    failures: FailureTally
    reward_s: float

    def add_refill(self, span: Span, generation: Generation, scores: Scores) -> _Counters:
        return _Counters(
            SpeculationStats.merge([self.stats, generation.stats]),
            replace(self.bubble, refills=[*self.bubble.refills, span]),
            FailureTally.merge([self.failures, FailureTally.of(scores.failures)]),
            self.reward_s + scores.waited_s,
        )


class RolloutGenerator:
    """Generates the rollouts of one step after another. All methods are collective over the ranks."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: Engine,
        source: PromptSource,
        rewards: RewardPool | None,
        training: Activity | None,
    ) -> None:
        """Prepare the use of idle time that `bubbles.use` asks for.

        Args:
            rewards: The pool that computes rewards; None except on the first rank of each engine.
            training: The training of the drafter while this rank is idle, if any.
        """
        self.source = source
        self._config, self._ranks, self._engine, self._rewards = config, ranks, engine, rewards
        self._place = place = EngineRank.of(ranks, config.engine.tensor_parallel)
        self._coordinator = None
        if place.num_engines > 1 and config.bubbles.use != "none":
            self._coordinator = BubbleCoordinator(ranks.store(), place)
        self._training = training
        self._earlier = EarlierResponses() if engine.replays and config.data.has_epochs else None
        """None if no prompt is repeated, or earlier responses cannot be drafted from."""
        self.next_texts: list[PregeneratedText] = []
        """The texts from which this rank's engine drafts in the next step."""

    def restore(self, rollouts_dir: Path, first_step: int) -> None:
        """Read from disk the texts that an undisturbed run would have before `first_step`."""
        if self._earlier is not None:
            self._earlier.restore(rollouts_dir, first_step, self._place.engine, self._place.num_engines)
            self._exchange([], first_step)

    def generate(self, step: int) -> StepRollouts:
        """Sample and score the responses of a step with policy version `step`, which the engine must hold.

        Groups without signal are dropped and replaced by other prompts, as `train.refill_rounds` says. The choice of
        prompts depends only on the policy's rewards, so that a restart makes the same choice.

        Raises:
            RewardError: The reward fails on every response.
        """
        prompts, train = self.source.batch(step), self._config.train
        own, texts, counted = self._own_share(prompts, step)
        rollouts, counters, failures = self._gather(prompts, own, counted)
        refills = 0
        while refills < train.refill_rounds and (missing := rollouts.num_missing(self._config)):
            refills += 1
            more = self.source.refill(step, refills)[:missing]
            counted = self._refill(more, step, own, counted)
            prompts += more
            rollouts, counters, failures = self._gather(prompts, own, counted)
        rollouts.assign_advantages(self._config)
        # The longest time that a rank waited for rewards with nothing else to do.
        waited_s = max(rank.reward_s for rank in counters)
        metrics = {"reward/failures": float(failures.count), "timing/reward_s": waited_s}
        if train.refill_rounds:
            dropped = len(prompts) - train.prompts_per_step
            metrics |= {"rollout/refill_rounds": float(refills), "rollout/dropped_groups": float(dropped)}
        if self._config.environment.name is not None:
            metrics["rollout/turns_mean"] = float(rollouts.num_turns.mean())
        if train.overlong_window:
            metrics["reward/overlong_penalty"] = float(rollouts.penalties(self._config).mean())
        if self._earlier is not None:
            self._earlier.add([prompt.id for prompt in prompts], own)
        self._exchange(texts, step + 1)
        return StepRollouts(
            rollouts,
            over_engines([rank.stats for rank in counters[:: self._config.engine.tensor_parallel]]),
            [rank.bubble for rank in counters],
            failures,
            metrics,
        )

    def _gather(
        self, prompts: Sequence[Prompt], own: Sequence[Rollout], counted: _Counters
    ) -> tuple[RolloutBatch, list[_Counters], FailureTally]:
        """Gather the scalars of all rollouts so far, and the counters of all ranks."""
        size = self._config.engine.tensor_parallel
        places = {prompt.id: index for index, prompt in enumerate(prompts)}
        data = self._config.data
        rollouts = RolloutBatch.gather(self._ranks, own, engine_size=size, prompt_places=places, data=data)
        counters = self._ranks.gather(counted)
        failures = FailureTally.merge(rank.failures for rank in counters[::size])  # those of one engine count the same
        refuse_failure(failures, len(rollouts), self._config.data, self._config.environment.name)
        return rollouts, counters, failures

    def _exchange(self, texts: Sequence[PregeneratedText], step: int) -> None:
        """Send pre-generated and earlier texts to the engines that answer their prompts in `step`."""
        if self._earlier is None and not self._config.bubbles.pregenerates:
            return
        config, prompts, engines = self._config, self.source.batch(step), self._place.num_engines
        dealt = [self._share(prompts, engine) for engine in range(engines)]
        readers = [{prompt.id for prompt, _ in asked} for asked in dealt]
        owners = {
            response_seed(config.seed, step, prompt.id, sample): engine
            for engine, asked in enumerate(dealt)
            for prompt, sample in asked
        }
        size = config.engine.tensor_parallel
        most, ids = MOST_DELIVERED // engines, [prompt.id for prompt in prompts]  # of each engine's own
        earlier = self._earlier.to(ids, most) if self._earlier is not None else []
        self.next_texts = deliver_texts(self._ranks, [*texts, *earlier], owners, readers, size)

    def _own_share(
        self, prompts: Sequence[Prompt], step: int
    ) -> tuple[list[Rollout], list[PregeneratedText], _Counters]:
        own = self._open(prompts)
        if self._coordinator is not None:
            self._coordinator.open()
        if self._earlier is not None or self._config.bubbles.pregenerates:
            store_texts(self._engine, [prompt for prompt, _ in own], self.next_texts)
        started_at = time.time()
        unscored = self._collect(own, step)
        bubble, texts = self._spend_bubble(step, started_at)
        rollouts, scores = unscored.scored()
        counters = _Counters(unscored.generation.stats, bubble, FailureTally.of(scores.failures), scores.waited_s)
        return rollouts, texts, counters

    def _spend_bubble(self, step: int, started_at: float) -> tuple[Bubble, list[PregeneratedText]]:
        """Work until the last rank has finished its share; this rank began its share at Unix time `started_at`."""
        generated_at, spans, texts = time.time(), list[Span](), list[PregeneratedText]()
        config, coordinator, uses = self._config, self._coordinator, list[Activity]()
        if coordinator is not None:
            if config.bubbles.pregenerates:
                ahead = Pregeneration(self._engine, self.source, config, coordinator, self._rewards, step + 1, texts)
                uses.append(ahead)
            if self._training is not None:
                uses.append(self._training)
            spans = put_to_use(self._engine, coordinator, uses)
        bubble = Bubble(
            rank=self._ranks.rank,
            started_at=started_at,
            generated_at=generated_at,
            spans=joined(spans),
            pregenerated_tokens=sum(len(text.tokens) for text in texts) if self._engine.is_first else 0,
            drafter_steps=sum(span.name == SPOT_TRAINING for span in spans),
        )
        return bubble, texts

    def _refill(self, prompts: Sequence[Prompt], step: int, own: list[Rollout], counted: _Counters) -> _Counters:
        """Add this rank's share of a refill to its rollouts and counters; a rank that finishes early waits."""
        share, started_at = self._open(prompts), time.time()
        if not share:
            return counted
        unscored = self._collect(share, step)
        span = Span(GENERATION, started_at, time.time())
        rollouts, scores = unscored.scored()
        own += rollouts
        return counted.add_refill(span, unscored.generation, scores)

    def _open(self, prompts: Sequence[Prompt]) -> list[Asked]:
        """This engine's share of the responses to these prompts."""
        asked = self._share(prompts, self._place.engine)
        return open_asked(self._engine, asked, self._config, self._rewards)

    def _share(self, prompts: Sequence[Prompt], engine: int) -> list[Asked]:
        samples, whole = self._config.train.samples_per_prompt, self._config.whole_groups
        return deal(prompts, samples, engine, self._place.num_engines, whole_groups=whole)

    def _collect(self, asked: Sequence[Asked], step: int) -> Unscored:
        origin = Origin(self._config.seed, step, self._ranks.rank)
        return collect(self._engine, asked, self._config, self._rewards, origin, recall=True, routes=True)
