"""Validation while the policy is trained: between steps, the training engine answers the held-out sets."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from specrl.artifacts import CURVE_FOLDER, SetScore, read_curve, write_scores
from specrl.config import Config
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.distributed import Ranks
from specrl.rollout.engine import Engine
from specrl.tracking.tracker import Tracker
from specrl.validation.answering import FOLDER, LastAnswers, answer, held_out_sets
from specrl.validation.stopping import best_of


class Validation:
    """Validates every `validate.every`-th policy version, the first and the last, and tracks the best one.

    It leaves the engine, the choice of drafts and the trainer unchanged: rollouts and policy are those of a run without
    validation (in FP32 bit for bit). `restore` and `run` are collective.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: Engine,
        source: PromptSource,
        rewards: RewardPool | None,
        tracker: Tracker,
        stage_dir: Path,
    ) -> None:
        self._every, self.best_metric = config.validate_.every, config.best_metric
        self._ranks, self._engine, self._tracker, self._stage_dir = ranks, engine, tracker, stage_dir
        self._rewards = rewards
        self._sets = held_out_sets(config, source) if self._every else []
        self._last = LastAnswers(engine, stage_dir / FOLDER, ranks.rank)
        self.curve: list[SetScore] = []

    def restore(self, step: int) -> None:
        """Read the scores of earlier starts of the stage; forget those of policies after `step`, which is run again."""
        curve, folder = [], self._stage_dir / CURVE_FOLDER
        if self._ranks.is_first:
            paths = {int(path.stem.partition("=")[2]): path for path in folder.glob("step=*.json")}
            for version, path in paths.items():
                if version > step:
                    path.unlink()
            curve = read_curve(self._stage_dir)
        now = {chosen.name: chosen.measure for chosen in self._sets}  # settings may have changed since
        self.curve = [score for score in self._ranks.gather(curve)[0] if score.measure == now.get(score.set, "")]

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether the policy after `step` RL steps is due for validation and has not been validated yet."""
        if not self._every or any(score.step == step for score in self.curve):
            return False
        return last or step % self._every == 0

    def run(self, step: int) -> bool:
        """Validate the policy after `step` RL steps, which the engine holds; return whether it is the best so far."""
        scores = [
            answer(self._engine, self._rewards, chosen, step, self._ranks, learn=False, last=self._last)[0]
            for chosen in self._sets
        ]
        self._engine.reset_prefix_cache()
        for score in scores:
            self._tracker.log_new_metrics(score.metrics(), step)
        if self._ranks.is_first:
            write_scores(self._stage_dir, step, scores)
        self.curve += scores
        best = self.best()
        return best is not None and best[0] == step

    def metrics_of(self, step: int) -> dict[str, float]:
        return {name: value for score in self.curve if score.step == step for name, value in score.metrics().items()}

    @property
    def measured(self) -> list[tuple[int, dict[str, float]]]:
        """(RL steps, all metrics) of each validated version, in the order of steps."""
        return [(step, self.metrics_of(step)) for step in sorted({score.step for score in self.curve})]

    def best(self, among: Collection[int] | None = None) -> tuple[int, float] | None:
        """(RL steps, value) of the version that is best by `best_metric`, `among` these or all."""
        metric = self.best_metric
        if metric is None:
            return None
        values = [(step, metrics[metric]) for step, metrics in self.measured if metric in metrics]
        return best_of(metric, [value for value in values if among is None or value[0] in among])
