"""What says that a run learns nothing, although every step of it succeeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specrl.config import Config

PATIENCE = 5
"""After how many steps in a row it is said."""
COLLAPSED = 0.05
"""The share of the first step's entropy below which the policy hardly explores any more."""
FIXED = 0.005
"""The entropy, in nats per token, below which it never does."""

Metrics = Mapping[str, float]


def lost_signals(history: Sequence[Metrics], first: Metrics, config: Config) -> list[str]:
    """A line for each reason to doubt the run that has now held for `PATIENCE` steps, or for all of a short run.

    `history` has the metrics of the last `PATIENCE` + 1 steps, or of all; `first` those of the first step.
    """
    patience = min(PATIENCE, config.train.num_steps)
    least = max(FIXED, COLLAPSED * first.get("policy/entropy", 0.0))
    doubts: list[tuple[Callable[[Metrics], bool], Callable[[Metrics, Metrics, Config], str]]] = [
        (lambda m: m.get("reward/zero_std_fraction", 0.0) >= 1 or not m.get("policy/grad_norm"), _why_nothing),
        (lambda m: m.get("rollout/truncated_fraction", 0.0) >= 1, _why_cut_off),
        (lambda m: m.get("policy/entropy", least) < least, _why_collapsed),
    ]
    lines = []
    for holds, words in doubts:
        held = [holds(metrics) for metrics in history[-patience - 1 :]]
        if len(held) >= patience and all(held[-patience:]) and not (len(held) > patience and held[0]):
            lines.append(f"for {patience} steps {words(history[-1], first, config)}")
    return lines


def _why_nothing(metrics: Metrics, first: Metrics, config: Config) -> str:
    mean, cut_off = metrics.get("reward/mean", 0.0), metrics.get("rollout/truncated_fraction", 0.0)
    if metrics.get("reward/std", 1.0) == 0:
        found = f"nothing was learned: all responses earned the same reward, {mean:g}"
        why = "the problems are too easy for this policy"
        if mean < config.validate_.correct_reward:
            why = "the reward does not find the answers (specrl reward CONFIG shows one), or the problems are too hard"
    elif metrics.get("reward/zero_std_fraction", 0.0) >= 1:
        found = "nothing was learned: in each group all responses earned the same reward"
        why = "each problem is solved always or never; take others, or raise train.samples_per_prompt"
    else:
        found = "nothing was learned: the gradient of the policy was 0"
        share = metrics.get("policy/corrected_fraction", 0.0)
        why = f"the ratio was clipped everywhere; train.correction left out {share:.0%} of the tokens"
    if metrics.get("reward/failures", 0.0):
        why = f"the reward failed on {metrics['reward/failures']:g} responses of the last step"
    elif cut_off >= 0.5:
        limit = f"sampling.max_response_tokens = {config.sampling.max_response_tokens}"
        why = f"{cut_off:.0%} of the responses were cut off at {limit}"
    return f"{found}; likely {why}"


def _why_cut_off(metrics: Metrics, first: Metrics, config: Config) -> str:
    limit = f"sampling.max_response_tokens = {config.sampling.max_response_tokens}"
    return f"all responses were cut off at {limit}; likely it is too small, or the policy does not end its responses"


def _why_collapsed(metrics: Metrics, first: Metrics, config: Config) -> str:
    entropy = f"{metrics['policy/entropy']:.2g} nats a token, after {first.get('policy/entropy', 0.0):.2g} in the first"
    return f"the policy has hardly explored: its entropy was {entropy}; likely policy.lr is too high"
