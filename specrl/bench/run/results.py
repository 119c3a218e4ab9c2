"""The measurements of `specrl bench run`, as rows with ratios to the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import itemgetter
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.stats import binomtest

from specrl.artifacts import SetScore, read_curve
from specrl.bench.pages import ratios
from specrl.bench.run.page import AGREES, SECONDS, on_gpus
from specrl.bench.run.trainings import Training
from specrl.projection.simulator.measured import DraftCounts
from specrl.rollout.drafts.acceptance import RECENT, REPLAY
from specrl.schemas import Rollout, read_folder

ResponseKey = tuple[int, int, int]  # step, prompt, number of the response
MEANS = {
    "token_mult_prob_error": "mismatch/token_mult_prob_error",
    "kl": "mismatch/kl",
    "acceptance_length": "spec/acceptance_length",
}
"""Columns that are means over all steps with the metric."""
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Results:
    training: Training
    warm_up: int

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        return self.training.metrics()

    @cached_property
    def curve(self) -> list[SetScore]:
        return read_curve(self.training.folder)

    @cached_property
    def responses(self) -> dict[ResponseKey, Rollout]:
        found = read_folder(self.training.folder / "rollouts")
        return {(rollout.step, rollout.prompt_id, rollout.sample): rollout for rollout in found}

    @cached_property
    def tokens(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for (step, *_), rollout in self.responses.items():
            found[step] += rollout.num_sampled
        return found

    @property
    def counted(self) -> range:
        """The steps after the warm-up."""
        return range(self.warm_up, len(self.metrics))

    def per_token(self, value: Callable[[Metrics], float]) -> list[float]:
        return [value(self.metrics[step]) / self.tokens[step] for step in self.counted]

    def drafts(self, steps: range) -> DraftCounts:
        """Count drafts and what they yielded in these steps."""
        own = [self.metrics[step] for step in steps]
        requests = [self.tokens[step] - self.metrics[step]["spec/num_accepted_tokens"] for step in steps]
        # Drafts are padded to the draft length of their iteration.
        lengths = [metrics.get("spec/k", 0.0) for metrics in own]
        speculation = self.training.context.config.speculation
        method = speculation.draft_method
        most = speculation.draft_lengths[0] if method.has_weights else 0
        passes = [min(most, metrics.get("spec/k", most)) for metrics in own]
        responses = [rollout for (step, *_), rollout in sorted(self.responses.items()) if step in steps]
        responses.sort(key=lambda rollout: rollout.num_sampled)
        alone = [one.num_sampled / max(1, one.num_sampled - one.num_accepted_tokens) for one in responses]
        return DraftCounts(
            k=float(np.average(lengths, weights=requests)),
            passes=float(np.average(passes, weights=[metrics["spec/decode_steps"] for metrics in own])),
            pace=sum(self.tokens[step] for step in steps) / sum(requests),
            paces=tuple(round(pace, 3) for pace in alone),
            whole_vocabulary=method.is_policy_layer,
        )

    def accepted(self, source: str) -> float | None:
        """The accepted share of the tokens drafted from a source of text in the counted steps."""
        drafted, accepted = (
            sum(self.metrics[step].get(f"spec/{source}_{kind}_tokens", 0.0) for step in self.counted)
            for kind in ("draft", "accepted")
        )
        return accepted / drafted if drafted else None

    def mean(self, metric: str) -> float | None:
        found = [metrics[metric] for metrics in self.metrics if metric in metrics]
        return fmean(found) if found else None

    def rewards(self) -> dict[tuple[int, int], float]:
        """The mean reward of the responses to each (step, prompt)."""
        groups: dict[tuple[int, int], list[float]] = {}
        for (step, prompt, _), rollout in self.responses.items():
            groups.setdefault((step, prompt), []).append(rollout.reward)
        return {key: fmean(rewards) for key, rewards in groups.items()}

    def row(self, baseline: Results, *, in_turn: bool = True) -> dict[str, Any]:
        """Make the row; ratios are above 1 where this training is faster than the baseline.

        Times are compared only if the two took their steps in turn.
        """
        decode_steps = itemgetter("spec/decode_steps")
        rewards, before = self.rewards(), baseline.rewards()
        differences = [rewards[key] - before[key] for key in before if key in rewards]
        own, plain = self.responses, baseline.responses
        same = fmean(key in own and own[key].response_tokens == other.response_tokens for key, other in plain.items())
        counted, drafts = self.metrics[self.warm_up :], self.drafts(self.counted)
        iterations = sum(map(decode_steps, counted))
        iterations_per_token = iterations / sum(self.tokens[step] for step in self.counted)
        return {
            **{"cell": self.training.cell.name, **self.training.cell.values},
            "is_baseline": self is baseline,
            **(self.speedups(baseline) if in_turn else {}),
            "decode_steps": iterations,
            "decode_step_ratio": sum(self.per_token(decode_steps)) / sum(baseline.per_token(decode_steps)),
            "iterations_per_token": iterations_per_token,
            "drafted_per_token": drafts.k / drafts.pace,
            "passes_per_token": drafts.passes * iterations_per_token,
            **{f"{name}_accepted": self.accepted(name) for name in (REPLAY, RECENT)},
            **{name: self.mean(metric) for name, metric in MEANS.items()},
            **{name: median(metrics.get(metric, 0.0) for metrics in counted) for name, metric in SECONDS.items()},
            "start_s": self.training.start_s or None,  # trained by an earlier command
            "reward_mean": fmean(rewards.values()),
            "reward_difference": fmean(differences),
            **self.accuracy(baseline),
            "tokens_equal": same == 1 and len(own) == len(plain),
            "same_responses": same,
            "reward_by_step": [metrics["reward/mean"] for metrics in self.metrics],
            "acceptance_length_by_step": [metrics.get("spec/acceptance_length", 1.0) for metrics in self.metrics],
            **self.projected(),
        }

    def accuracy(self, baseline: Results) -> dict[str, Any]:
        """Accuracy on held-out prompts by step, with its interval, and finally against the baseline's.

        The p-value is from the exact sign test over prompts, which is McNemar's test if rewards are 0 or 1.
        """
        if not self.curve or not baseline.curve:
            return {}
        last, other = self.curve[-1], baseline.curve[-1]
        by_step = [[score.step, score.accuracy, *score.ci["accuracy"]] for score in self.curve]
        found: dict[str, Any] = {"accuracy": last.accuracy, "accuracy_by_step": by_step}
        if last.measure != other.measure:  # of other prompts, or sampled or scored otherwise
            return found
        pairs = zip(last.prompt_accuracies, other.prompt_accuracies, strict=True)
        signs = [np.sign(own - before) for own, before in pairs]
        better, worse = signs.count(1), signs.count(-1)
        p_value = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
        return found | {"better_and_worse_prompts": [better, worse], "p_value": p_value}

    def speedups(self, baseline: Results) -> dict[str, float]:
        def step_s(metrics: Metrics) -> float:
            return metrics["timing/step_s"] - metrics.get("timing/validation_s", 0.0)

        found: dict[str, float] = {}
        for name, seconds in (("generation", itemgetter("timing/generation_s")), ("step", step_s)):
            found |= ratios(baseline.per_token(seconds), self.per_token(seconds)).columns(f"{name}_ratio")
        trainings = ((one.tokens.total(), one.training) for one in (self, baseline))
        own, before = (tokens / (training.start_s + sum(training.walls)) for tokens, training in trainings)
        return found | {"end_to_end_ratio": own / before}

    def projected(self) -> dict[str, Any]:
        """What drafts yielded, epoch by epoch, and the projected step of an 8B policy on GPUs.

        Not for a draft model, because the projected drafter has EAGLE-3's size; nor for text from idle time, whose
        amount depends on these ranks (`with_idle_time` simulates it for more engines).
        """
        config = self.training.context.config
        method = config.speculation.draft_method
        if method.model == "draft_model" or config.bubbles.pregenerates:
            return {}
        problems, prompts = config.data.num_problems, config.train.prompts_per_step
        size = problems // prompts if problems else len(self.metrics)
        epochs = [range(first, min(first + size, len(self.metrics))) for first in range(0, len(self.metrics), size)]
        drafts = [self.drafts(steps) for steps in epochs]
        updates = (method.has_weights and config.drafter.online_lr > 0) / config.drafter.update_every
        idle = {}
        if method.replays:
            idle = {agrees: on_gpus(drafts, updates, tokens) for agrees, tokens in AGREES.items()}
        return {
            "drafts_by_epoch": [asdict(one) for one in drafts],
            **on_gpus(drafts, updates),
            "with_idle_time": idle,
        }
