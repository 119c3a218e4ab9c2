"""How times grow along a series, as exponents, beside how their arithmetic grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specrl.bench.growth.points import Point

TOLERANCE = 0.15
"""By how much an exponent may exceed that of the arithmetic, for the noise of a few steps."""
NOTHING_S = 1e-4
"""The seconds below which a part does nothing, such as the drafter's update without a drafter."""
NEGLIGIBLE_S = 0.05
"""The seconds below which a part is all constants, and its growth is not judged."""


@dataclass(frozen=True)
class PointTimes:
    """The times of a step's parts at one point."""

    size: float
    point: Point
    seconds: dict[str, float]
    """The measured seconds by part, the whole `step` among them."""
    least: dict[str, float]
    """The seconds of the arithmetic, of the parts that have any, and of all of these together as `step`."""


@dataclass(frozen=True)
class Growth:
    """How one part of a step grows along a series."""

    series: str
    part: str
    measured: float
    """The exponent over the whole series."""
    last: float
    """The exponent between the two largest sizes, where constants matter least."""
    least: float | None
    """That of the arithmetic between the two largest sizes; None for a part without any."""
    seconds: float
    """The measured seconds at the largest size."""

    @property
    def too_fast(self) -> bool:
        """Whether the part grows faster than its arithmetic at the largest sizes, by more than measurements scatter."""
        return self.least is not None and self.seconds > NEGLIGIBLE_S and self.last > self.least + TOLERANCE


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of the straight line through (log size, log seconds), by least squares."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - middle_x) ** 2 for x in xs)


def growth(series: str, times: Sequence[PointTimes]) -> list[Growth]:
    """Return how each part of a step grows along a series of at least two points, in the order of their sizes."""
    sizes = [item.size for item in times]
    found = []
    for part in times[-1].seconds:
        seconds = [item.seconds[part] for item in times]
        if min(seconds) < NOTHING_S:
            continue
        least = [item.least[part] for item in times if part in item.least]
        found.append(
            Growth(
                series,
                part,
                exponent(sizes, seconds),
                exponent(sizes[-2:], seconds[-2:]),
                exponent(sizes[-2:], least[-2:]) if least else None,
                seconds[-1],
            )
        )
    return found
