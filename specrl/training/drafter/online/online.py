"""The drafter's update in each RL step: with a learning rate that follows its gain, and a way back to the best weights.

What is measured, and why that is fair, is said in `rate.py`. It changes how fast the drafter learns and never a
sampled token. `DrafterGuard` stays what notices a drafter that is damaged, stale or lost: it watches the engine, and a
slow decline is none of its concern. An update that ruins the drafter at once is noticed here, on the text that the
update learned from (`is_as_good_as_before`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specrl.training.checkpoint.host_copy import HostTensors
from specrl.training.drafter.online.rate import OnlineRate, PairedCounts
from specrl.training.drafter.online.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.drafter.ttt import acceptance_of
from specrl.training.features import Features, spread_sequences

BEST = "best/"
"""The prefix of the best weights and their optimizer in a checkpoint, behind which names are the drafter's own."""
JUDGED_TOKENS = 256
"""About how many tokens of each rank's sequences `OnlineTraining.is_as_good_as_before` measures a drafter on."""
FALL, SMOOTHING = 0.8, 0.5
"""A drafter is as good as before if at least `FALL` of its usual acceptance remains at each position; below that, the
probe of an engine decides, because acceptance also varies with the responses. `SMOOTHING` is the weight of an update's
acceptance in the usual one."""
FACTOR, WAITED = "online/factor", "online/waited"
"""The names of the state of `OnlineRate` in a checkpoint."""
USUAL = "online/usual"
"""The name of the usual acceptance in a checkpoint."""


class OnlineTraining:
    """Trains the drafter once in each step. All ranks call `update`, in the same order."""

    def __init__(self, drafter: Drafter, spot: SpotTraining | None = None) -> None:
        """Begin without a history.

        Args:
            spot: Trains the drafter in idle time, too; None where nothing does.
        """
        self._drafter, self._spot = drafter, spot
        self._rate = OnlineRate(drafter.config.online_lr_range)
        self._buffers = HostTensors()
        self._best: dict[str, Tensor] = {}
        """The state of the drafter that was best so far, in host memory; empty before the first update."""
        self._usual: tuple[float, ...] = ()
        """The usual acceptance at each position; empty before the first update."""
        self._usual_before: tuple[float, ...] = ()
        """The same, as it was before the last update."""
        self._events: list[str] = []

    @property
    def lr(self) -> float:
        """The present learning rate."""
        return self._drafter.config.online_lr * self._rate.factor

    def update(self, features: Sequence[Features | None]) -> dict[str, float]:
        """Train on the features of a step's policy update, or merge what was trained in idle time (collective).

        Before that the drafter may be compared with its best weights, and go back to them.

        Returns:
            The metrics of `Drafter.update`, the learning rate `lr`, `reverted` (1 where the best weights came back,
            else 0), and where weights were compared `gain`: by how many accepted tokens per draft the present ones
            are ahead of the best ones.
        """
        merged = self._spot.merge() if self._spot is not None else {}
        compared = self._compare(features) if self._drafter.config.online_lr else {}
        metrics = merged or self._drafter.update(list(features), lr=self.lr)
        self._usual_before = self._usual
        if metrics["num_tokens"]:
            rates = acceptance_of(metrics)
            usual = self._usual or rates
            self._usual = tuple(old + SMOOTHING * (new - old) for old, new in zip(usual, rates, strict=True))
        if self._spot is not None:
            self._spot.remember(features, self.lr)
        return {**metrics, "lr": self.lr, **compared}

    def is_as_good_as_before(self, features: Sequence[Features | None]) -> bool:
        """Return whether the drafter, after an update, gets its tokens accepted as before it (collective).

        This is what a probe of the engine shows of a drafter that training may have ruined, in a forward pass of the
        drafter alone. It shows neither that the engine drafts like the trainer nor how well unseen text is drafted;
        the rollouts that follow show both.

        Args:
            features: Those that the update learned from; without any the answer is no.
        """
        few = spread_sequences(features, JUDGED_TOKENS)
        found = self._drafter.update([few] if few is not None else [], lr=0.0)
        if not (found["num_tokens"] and self._usual_before):
            return False
        pairs = zip(acceptance_of(found), self._usual_before, strict=True)
        return all(rate >= FALL * usual > 0 for rate, usual in pairs)

    def take_events(self) -> list[str]:
        """Return a line for each time since the last call that the best weights came back."""
        events, self._events = self._events, []
        return events

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the drafter and of its history, from which the same training goes on to the bit."""
        best = {BEST + name: tensor for name, tensor in self._best.items()}
        factor = torch.tensor(self._rate.factor, dtype=torch.float64)
        usual = torch.tensor(self._usual, dtype=torch.float64)
        history = {FACTOR: factor, WAITED: torch.tensor(self._rate.waited), USUAL: usual}
        return {**self._drafter.state_dict(), **best, **history}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; without best weights in it, the history begins with the next update.

        Raises:
            ValueError: The state belongs to a drafter with another draft vocabulary.
        """
        self._drafter.load_state_dict(state)
        self._usual = tuple(state[USUAL].tolist()) if USUAL in state else ()
        best = {name.removeprefix(BEST): tensor for name, tensor in state.items() if name.startswith(BEST)}
        self._best = self._buffers.take(best)
        self._rate = OnlineRate(self._drafter.config.online_lr_range)
        if best:
            self._rate.waited = int(state[WAITED])
            self._rate.factor = self._rate.within(float(state[FACTOR]))

    def _compare(self, features: Sequence[Features | None]) -> dict[str, float]:
        """Compare present and best weights where that is due, and go on with what is clearly better (collective).

        Returns:
            `reverted`, and `gain` where there was anything to compare.
        """
        due = self._rate.due()
        if not self._best:
            self._keep()
        if not due:
            return {"reverted": 0.0}
        counts = self._count(features)
        verdict = self._rate.judge(counts)
        if verdict == "better":
            self._keep()
        elif verdict == "worse":
            self._go_back(counts)
        gain = {"gain": counts.d / counts.n} if counts.n else {}
        return {"reverted": float(verdict == "worse"), **gain}

    def _keep(self) -> None:
        self._best = self._buffers.take(self._drafter.state_dict())

    def _go_back(self, counts: PairedCounts) -> None:
        self._drafter.load_state_dict(self._best)
        gain, error = counts.gain()
        self._events.append(
            f"online training has made the drafter worse: on the same {counts.responses} responses {-gain:.3f} fewer "
            f"tokens per draft are accepted than with its best weights (standard error {error:.3f}); these came back, "
            f"with a learning rate of {self.lr:.2g}"
        )

    @torch.no_grad()
    def _count(self, features: Sequence[Features | None]) -> PairedCounts:
        """Count what present and best weights get accepted of this step's text, on all ranks (collective)."""
        drafter = self._drafter
        present = drafter.accepted(features)
        weights = {name: tensor.clone() for name, tensor in drafter.model.state_dict().items()}
        drafter.model.load_state_dict({name: self._best[f"model/{name}"] for name in weights})
        best = drafter.accepted(features)
        drafter.model.load_state_dict(weights)
        own = PairedCounts.of((n, a, b) for (n, a), (_, b) in zip(present, best, strict=True))
        return PairedCounts.total(drafter.ranks.gather(own))
