"""The weights of draft positions in the drafter's loss, and the number of positions that pretraining unrolls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

FIRST_DECAY = 0.8
"""The share of drafts taken to be right before any is measured."""
RATE = 0.1
"""The weight of a step's measurement in the running mean."""


class PositionWeights:
    """The weight of each draft position in the loss.

    A token of a draft counts only if all tokens before it were accepted. So the weight of position j is decay ** j, or
    the measured share of drafts whose first j tokens were accepted, as a running mean over the steps of the training.
    """

    def __init__(self, decay: float | Literal["measured"], num_positions: int) -> None:
        self.measured = decay == "measured"
        """Whether the weights follow measurements."""
        ratio = FIRST_DECAY if decay == "measured" else decay
        self.shares = [ratio**position for position in range(num_positions)]
        """The weight of each position."""

    def go_on(self, shares: Sequence[float] | None) -> None:
        """Go on from what another training has measured, if weights are measured and it had as many positions."""
        if self.measured and shares is not None and len(shares) == len(self.shares):
            self.shares = [float(share) for share in shares]

    def follow(self, chains: Sequence[float], reached: Sequence[float]) -> None:
        """Move the weights towards what was measured in a step.

        Args:
            chains: For each position, the number of drafts that could have had a token there.
            reached: For each position, the number of those whose tokens before it were all accepted.
        """
        for position, (count, right) in enumerate(zip(chains, reached, strict=True)):
            if count:
                self.shares[position] += RATE * (right / count - self.shares[position])


def unrolled_positions(step: int, num_steps: int, most: int, growth: float) -> int:
    """The number of draft positions that are unrolled at a step of the pretraining.

    Args:
        step: The step, counted from 0.
        num_steps: The number of steps before the last epoch.
        most: The number of positions in the end.
        growth: The share of `num_steps` in which the number grows evenly from 1 to `most`; 0 begins with `most`.
    """
    growing = growth * num_steps
    return most if step >= growing else 1 + int(step / growing * most)
