"""The conditions that end training early, and the signs that a run learns nothing although its steps succeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specrl.config import Config, StopConfig
from specrl.distributed import Ranks
from specrl.metrics import find_metric

Values = Sequence[tuple[int, float]]  # (number of RL steps, value), in order


class EarlyStop:
    """Watches the metric of `train.stop_when`; without one it never stops. `restore` and `observe` are collective."""

    def __init__(self, condition: StopConfig | None, ranks: Ranks, begun: int = 0) -> None:
        """`begun` is the step at which training went on with other settings, which may measure something else."""
        self._condition, self._ranks, self._begun = condition, ranks, begun
        self.metric = condition.metric if condition is not None else None
        self._values: list[tuple[int, float]] = []
        self.reason: str | None = None  # why training ends

    def restore(self, known: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Replace the values by an earlier start's measurements, which are the same on all ranks."""
        self._values, self.reason = [], None
        for step, metrics in sorted(known, key=lambda measured: measured[0]):
            self.observe(step, metrics)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics measured after `step` RL steps, and decide by those of the first rank.

        Values from before the first step do not stop training, but later values are compared with them.
        """
        if self._condition is None:
            return
        value = self._ranks.gather(metrics.get(self._condition.metric))[0]
        if value is None or (self._begun and step <= self._begun):
            return
        self._values.append((step, value))
        if self.reason is None and step:
            self.reason = stop_reason(self._condition, self._values)


def stop_reason(condition: StopConfig, values: Values) -> str | None:
    """Why the latest value ends training, or None; NaN ends nothing."""
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
    """The best of the values by the metric's definition, the first of equal ones; None if all are NaN."""
    definition = find_metric(metric)
    assert definition is not None and definition.better is not None, metric
    sign = 1 if definition.better == "higher" else -1
    numbers = [item for item in values if item[1] == item[1]]
    return max(numbers, key=lambda item: sign * item[1], default=None)


PATIENCE = 5  # steps in a row
COLLAPSED = 0.05  # times the first step's entropy: below this, the policy hardly explores
FIXED = 0.005  # nats per token: below this, it never does
EQUAL = "reward/zero_std_fraction"

Metrics = Mapping[str, float]


def lost_signals(history: Sequence[Metrics], first: Metrics, config: Config) -> list[str]:
    """A line for each reason to doubt the run that has now held for `PATIENCE` steps, or for all of a short run.

    `history` holds the metrics of the last `PATIENCE` + 1 steps, or of all; `first` those of the first step.
    """
    patience = min(PATIENCE, config.train.num_steps)
    by_reward = config.train.advantage.name != "none"
    before, now = (metrics.get("policy/entropy", 0.0) for metrics in (first, history[-1]))
    least = max(FIXED, COLLAPSED * before)
    limit = f"sampling.max_response_tokens = {config.sampling.max_response_tokens}"
    doubts: list[tuple[Callable[[Metrics], bool], str]] = [
        (
            lambda m: (by_reward and m.get(EQUAL, 0.0) >= 1) or not m.get("policy/grad_norm"),
            _why_nothing(history[-1], config),
        ),
        (
            lambda m: m.get("rollout/truncated_fraction", 0.0) >= 1,
            f"all responses were cut off at {limit}; likely it is too small, or the policy does not end its responses",
        ),
        (
            lambda m: m.get("policy/entropy", least) < least,
            f"the policy has hardly explored: its entropy was {now:.2g} nats a token, after {before:.2g} in the first; "
            "likely policy.lr is too high",
        ),
    ]
    lines = []
    for holds, words in doubts:
        held = [holds(metrics) for metrics in history[-patience - 1 :]]
        if len(held) >= patience and all(held[-patience:]) and not (len(held) > patience and held[0]):
            lines.append(f"for {patience} steps {words}")
    return lines


def _why_nothing(metrics: Metrics, config: Config) -> str:
    mean, cut_off = metrics.get("reward/mean", 0.0), metrics.get("rollout/truncated_fraction", 0.0)
    if metrics.get("policy/teacher_kl") == metrics.get("policy/grad_norm") == 0:
        return "nothing was learned: the gradient of the policy was 0; likely train.teacher is the policy itself"
    by_reward = config.train.advantage.name != "none"
    if by_reward and metrics.get("reward/std", 1.0) == 0:
        found = f"nothing was learned: all responses earned the same reward, {mean:g}"
        why = "the problems are too easy for this policy"
        if mean < config.validate_.correct_reward:
            why = "the reward does not find the answers (specrl reward CONFIG shows one), or the problems are too hard"
    elif by_reward and metrics.get(EQUAL, 0.0) >= 1:
        found = "nothing was learned: in each group all responses earned the same reward"
        why = "each problem is solved always or never; take others, or raise train.samples_per_prompt"
    else:
        found = "nothing was learned: the gradient of the policy was 0"
        share = metrics.get("policy/corrected_fraction", 0.0)
        why = f"the ratio was clipped everywhere; train.correction left out {share:.0%} of the tokens"
    if config.train.teacher is not None and metrics.get("policy/grad_norm"):
        found = found.replace("learned", "learned from rewards", 1)
    if by_reward and metrics.get("reward/failures", 0.0):
        why = f"the reward failed on {metrics['reward/failures']:g} responses of the last step"
    elif cut_off >= 0.5:
        limit = f"sampling.max_response_tokens = {config.sampling.max_response_tokens}"
        why = f"{cut_off:.0%} of the responses were cut off at {limit}"
    return f"{found}; likely {why}"
