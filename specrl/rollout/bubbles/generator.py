"""The rollouts of a step over all ranks: prompts are dealt, answered and scored; ranks that wait use the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import FailureTally, RewardPool, refuse_failure
from specrl.distributed import Ranks
from specrl.rollout.bubbles.bubbles import Activity, Bubbles
from specrl.rollout.bubbles.coordinator import EngineRank
from specrl.rollout.bubbles.earlier import EarlierResponses
from specrl.rollout.bubbles.pregeneration import store_texts
from specrl.rollout.bubbles.texts import PregeneratedText, deliver_texts
from specrl.rollout.collect import Origin, collect
from specrl.rollout.drafts.acceptance import SpeculationStats, over_engines
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout
from specrl.timeline import Bubble, Pace
from specrl.training.rollouts import RolloutBatch


@dataclass(frozen=True)
class StepRollouts:
    """What all ranks generated in one step; the same on every rank but for the rollouts that it holds."""

    rollouts: RolloutBatch
    """With rewards and advantages, in the order of the step's prompts and, within each, of its samples."""
    stats: SpeculationStats
    """See `over_engines`."""
    bubbles: list[Bubble]
    """In rank order."""
    failures: FailureTally
    reward_s: float
    """The longest time that a rank waited for rewards with nothing else to do, in seconds."""

    def metrics(self) -> dict[str, float]:
        """What the rewards cost, by the names in MLflow."""
        return {"reward/failures": float(self.failures.count), "timing/reward_s": self.reward_s}


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
            rewards: The pool that computes rewards; None on ranks whose engine has another first rank.
            training: The training of the drafter while this rank waits, if any.
        """
        self.source = source
        self._config, self._ranks, self._engine, self._rewards = config, ranks, engine, rewards
        self._place = EngineRank.of(ranks, config.engine.tensor_parallel)
        self._bubbles = Bubbles(config, ranks, engine, source, training)
        self._earlier = EarlierResponses() if engine.replays and config.data.source == "file" else None
        """None where no prompt comes again, or its earlier responses could not be drafted from."""
        self._stored: dict[int, list[PregeneratedText]] = {}
        """The texts to the next step's prompts of this rank's engine, by prompt id."""

    def restore(self, rollouts_dir: Path, first_step: int) -> None:
        """Find the texts on disk that an undisturbed run would have before `first_step`."""
        if self._earlier is not None:
            self._earlier.restore(rollouts_dir, first_step, self._place.engine, self._place.num_engines)
            self._exchange([], first_step)

    def generate(self, step: int) -> StepRollouts:
        """Sample and score the responses of a step by the policy of version `step`, which the engine must hold.

        Raises:
            RewardError: The reward fails on every response.
        """
        prompts = self.source.batch(step)
        size = self._config.engine.tensor_parallel
        own, texts, counted = self._own_share(prompts, step)
        places = {prompt.id: index for index, prompt in enumerate(prompts)}
        rollouts = RolloutBatch.gather(self._ranks, own, engine_size=size, prompt_places=places)
        of_ranks, bubbles, failed, waited_s = zip(*self._ranks.gather(counted), strict=True)
        stats = over_engines(of_ranks[::size])  # the ranks of one engine count the same
        failures = FailureTally.merge(failed[::size])
        refuse_failure(failures, len(rollouts), self._config.data)
        rollouts.assign_advantages(self._config.train)
        if self._earlier is not None:
            self._earlier.add(places, own)
        self._exchange(texts, step + 1)
        return StepRollouts(rollouts, stats, list(bubbles), failures, max(waited_s))

    @property
    def next_texts(self) -> list[PregeneratedText]:
        """The texts that this rank's engine has to draft from in the next step."""
        return [text for texts in self._stored.values() for text in texts]

    def _exchange(self, texts: Sequence[PregeneratedText], step: int) -> None:
        """Send what engines have generated ahead or earlier to those that answer the prompts of `step`."""
        if self._earlier is None and not self._config.bubbles.pregenerates:
            return
        # Prompts are dealt to the engines in turn.
        engines = {prompt.id: i % self._place.num_engines for i, prompt in enumerate(self.source.batch(step))}
        earlier = self._earlier.to(engines) if self._earlier is not None else []
        self._stored = {}
        for text in deliver_texts(self._ranks, [*texts, *earlier], engines, self._config.engine.tensor_parallel):
            self._stored.setdefault(text.prompt_id, []).append(text)

    def _take_saved_seconds(self) -> float | None:
        drafting = self._engine.drafting
        return drafting.take_saved_seconds() if drafting is not None else None

    def _own_share(
        self, prompts: Sequence[Prompt], step: int
    ) -> tuple[list[Rollout], list[PregeneratedText], tuple[SpeculationStats, Bubble, FailureTally, float]]:
        config, ranks = self._config, self._ranks
        samples = config.train.samples_per_prompt
        own = prompts[self._place.engine :: self._place.num_engines]
        self._bubbles.open()
        if self._earlier is not None or config.bubbles.pregenerates:
            store_texts(self._engine, own, self._stored)
        self._take_saved_seconds()  # what has been generated ahead is no part of this step
        started_at = time.time()
        pace = Pace(len(own) * samples, config.engine.max_num_seqs)
        unscored = collect(
            self._engine,
            own,
            samples,
            config,
            self._rewards,
            Origin(config.seed, step, ranks.rank),
            on_progress=pace.on_progress,
            on_iteration=pace.on_iteration,
            recall=True,
            routes=True,
        )
        saved_s = self._take_saved_seconds()
        bubble, texts = self._bubbles.spend(step, started_at, unscored.generation, pace.rows(), saved_s)
        rollouts, scores = unscored.scored()
        counted = unscored.generation.stats, bubble, FailureTally.of(scores.failures), scores.waited_s
        return rollouts, texts, counted
