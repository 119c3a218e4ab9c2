"""The ways to roll out that benchmarks compare: a draft method with a use of idle time. This imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from specrl.config.methods import METHODS
from specrl.config.rollout import BubbleUse

PLAIN = "plain"
"""The name of synchronous decoding without speculation, with which all others are compared."""


@dataclass(frozen=True)
class Use:
    """A draft method, and the use of the time in which ranks wait."""

    method: str
    """The value of `speculation.method`."""
    bubbles: BubbleUse
    """The value of `bubbles.use`."""

    @property
    def problem(self) -> str | None:
        """Why the two do not go together, in words; None if they do."""
        method = METHODS[self.method]
        if self.bubbles in ("pregenerate", "both") and not method.replays:
            return f"{self.method} does not draft from stored text, which {self.bubbles} makes"
        if self.bubbles in ("train_drafter", "both") and not method.has_weights:
            return f"{self.method} has no drafter, which {self.bubbles} trains"
        return None


USES: Mapping[str, Use] = {
    PLAIN: Use("none", "none"),
    "eagle3": Use("eagle3", "none"),
    "recent": Use("replay", "none"),
    "pregenerate": Use("replay", "pregenerate"),
    "train_drafter": Use("eagle3", "train_drafter"),
    "both": Use("eagle3+replay", "both"),
}
"""The uses by name. `pregenerate` has no drafter, as in the publication. It drafts from the text made in bubbles and,
like every method with replay, from recent rollouts; `recent` drafts from these alone."""


def parse_use(text: str) -> Use:
    """Return the use of this name, or that is given as METHOD/BUBBLES, such as `ngram/none`.

    Raises:
        ValueError: There is no such use.
    """
    method, separator, bubbles = text.partition("/")
    if text in USES:
        return USES[text]
    if not separator or method not in METHODS or bubbles not in get_args(BubbleUse):
        raise ValueError(
            f"{text!r} is not one of {', '.join(USES)}, or METHOD/BUBBLES with a METHOD of {', '.join(METHODS)} and "
            f"BUBBLES of {', '.join(get_args(BubbleUse))}"
        )
    use = Use(method, next(name for name in get_args(BubbleUse) if name == bubbles))
    if use.problem is not None:
        raise ValueError(f"{text!r}: {use.problem}")
    return use
