"""Early stop: training ends before `train.num_steps` once a metric says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrl.config import StopConfig
from specrl.distributed import Ranks
from specrl.metrics import find_metric

Values = Sequence[tuple[int, float]]
"""(number of RL steps, value of the metric), in the order of steps."""


class EarlyStop:
    """Watches the metric of `train.stop_when`; without one it never stops. `restore` and `observe` are collective."""

    def __init__(self, condition: StopConfig | None, ranks: Ranks) -> None:
        self._condition, self._ranks = condition, ranks
        self.metric = condition.metric if condition is not None else None
        self._values: list[tuple[int, float]] = []
        self.reason: str | None = None
        """Why training ends, in one line; None while it goes on."""

    def restore(self, known: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Forget everything, and take in what an earlier start measured, by step, the same on all ranks."""
        self._values, self.reason = [], None
        for step, metrics in sorted(known, key=lambda measured: measured[0]):
            self.observe(step, metrics)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in what was measured when `step` RL steps were done, and decide as the first rank's metrics say.

        What is measured before the first step does not stop training, but later values are compared with it.
        """
        if self._condition is None:
            return
        value = self._ranks.gather(metrics.get(self._condition.metric))[0]
        if value is None:
            return
        self._values.append((step, value))
        if self.reason is None and step:
            self.reason = stop_reason(self._condition, self._values)


def stop_reason(condition: StopConfig, values: Values) -> str | None:
    """Why the latest value ends training, or None if it does not. A value that is no number ends nothing."""
    step, value = values[-1]
    found = f"{condition.metric} = {value:.4g} after step {step}"
    if condition.above is not None and value > condition.above:
        return f"{found} is above {condition.above:g}"
    if condition.below is not None and value < condition.below:
        return f"{found} is below {condition.below:g}"
    if condition.no_gain_for is None:
        return None
    best = best_of(condition.metric, values)
    since = len(values) - 1 - (values.index(best) if best is not None else 0)
    if since < condition.no_gain_for:
        return None
    before = "" if best is None else f", {best[1]:.4g} after step {best[0]} was the best"
    return f"{found}: no gain for {since} measurements{before}"


def best_of(metric: str, values: Values) -> tuple[int, float] | None:
    """The best of the values, as the metric's definition has it, the first of equal ones; None if none is a number."""
    definition = find_metric(metric)
    assert definition is not None and definition.better is not None, metric
    sign = 1 if definition.better == "higher" else -1
    numbers = [item for item in values if item[1] == item[1]]
    return max(numbers, key=lambda item: sign * item[1], default=None)
