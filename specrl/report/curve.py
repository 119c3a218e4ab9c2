"""The validation curve of a training, as table rows and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from specrl.artifacts import SetScore
from specrl.report.plots import line_chart


def by_set(curve: Sequence[SetScore]) -> dict[str, list[SetScore]]:
    found: dict[str, list[SetScore]] = {}
    for score in curve:
        found.setdefault(score.set, []).append(score)
    return found


def curve_rows(curve: Sequence[SetScore]) -> list[tuple[str, str]]:
    """Make a row per held-out set, such as `23.4% -> 50.8% at step 8 (42.2% to 59.3%; best 52.3% at step 6)`."""
    rows = []
    for name, scores in by_set(curve).items():
        first, last = scores[0], scores[-1]
        best = max(scores, key=lambda score: score.accuracy)
        low, high = last.ci.get("accuracy", (nan, nan))
        extent = f"{low:.1%} to {high:.1%}; best {best.accuracy:.1%} at step {best.step}"
        text = f"{first.accuracy:.1%} -> {last.accuracy:.1%} at step {last.step} ({extent})"
        if last.k > 1:
            text += f", pass@{last.k} {first.pass_at_k:.1%} -> {last.pass_at_k:.1%}"
        rows.append((f"validation, {name}", text))
    return rows


def curve_chart(curve: Sequence[SetScore]) -> str:
    """Draw the accuracy of each set over the RL steps, with its confidence interval as a band."""
    series = {
        name: [(score.step, score.accuracy, *score.ci["accuracy"]) for score in scores]
        for name, scores in by_set(curve).items()
    }
    return line_chart(series, "RL step", "accuracy")
