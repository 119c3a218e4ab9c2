"""The page of `specrl bench precision`: the table, whether the published order holds, reward and agreement by step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.settings import PrecisionSettings
from specrl.bench.tables import Spread, markdown_table
from specrl.report.svg import line_charts

if TYPE_CHECKING:
    from specrl.bench.precision import Measured

ERROR = "mismatch/token_mult_prob_error"
LEGEND = """
Mean over the seeds, least and greatest in brackets. *error*: token_mult_prob_error, the mean over a step's tokens of
exp(|log p_training - log p_generation|), over all steps; *worst step*: the largest of any step. *accuracy*: held-out
prompts, after the steps, by the engine they were sampled with. *acceptance length*: the drafter, in BF16 always, on the
same prompts. *update*: seconds of a policy update against BF16, medians. *KV scales*: share of the step that measuring
them took. *engine*, *trainer*: how FP8 was computed.
"""


def write(job: BenchJob, settings: PrecisionSettings, found: Sequence[Measured]) -> None:
    page = Page(job.page)
    page.text(heading("FP8 in generation and training", job.command, settings.threads))
    page.text(f"Run `{job.run_dir.name}`, {settings.num_steps} RL steps, seeds {', '.join(map(str, settings.seeds))}.")
    page.text(table(found))
    page.text(LEGEND)
    page.text(order(found))
    for name, metric, label in (("reward", "reward/mean", "mean reward"), ("error", ERROR, "token_mult_prob_error")):
        page.plot(name, line_charts(curves(found, metric), "RL step", label), f"{label} by RL step, mean of the seeds")
    page.write()


def by_setting(found: Sequence[Measured]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for item in found:
        groups.setdefault(item.setting.name, []).append(item)
    return groups


def table(found: Sequence[Measured]) -> str:
    groups = by_setting(found)
    plain = {item.seed: item for item in groups["BF16"]}
    rows = []
    for name, items in groups.items():
        updates = [
            item.median("timing/policy_update_s") / plain[item.seed].median("timing/policy_update_s") for item in items
        ]
        shares = [item.median("timing/kv_scales_s") / item.median("timing/step_s") for item in items]
        worst = max(record.metrics.get(ERROR, 1.0) for item in items for record in item.records)
        memory = max((item.outcome.memory_gib or 0.0) for item in items)
        rows.append(
            [
                name,
                items[0].correction,
                spread([item.mean(ERROR) for item in items], ".4f"),
                f"{worst:.3f}",
                spread([item.mean("mismatch/kl") for item in items], ".5f"),
                spread([item.outcome.accuracy for item in items], ".1%"),
                spread([item.records[-1].metrics["reward/mean"] for item in items], ".3f"),
                f"{fmean(item.outcome.acceptance_length for item in items):.2f}",
                f"{fmean(updates):.2f}x",
                f"{fmean(shares):.1%}",
                f"{fmean(item.median('performance/generation_tokens_per_s') for item in items):.0f}",
                f"{memory:.1f} GiB" if memory else "-",
                f"{items[0].outcome.engine_mode} / {items[0].outcome.training_mode}",
                str(items[0].outcome.quantised_layers),
            ]
        )
    columns = (
        *("setting", "correction", ">error", ">worst step", ">KL, nats/token", ">accuracy", ">last reward"),
        *(">acceptance length", ">update", ">KV scales", ">generated tokens/s", ">GPU memory", "engine / trainer"),
        ">FP8 layers",
    )
    return markdown_table(columns, rows)


def order(found: Sequence[Measured]) -> str:
    """Whether error(BF16) < error(FP8 both) < error(FP8 generation only), seed by seed."""
    groups = by_setting(found)
    names = ("BF16", "FP8 both", "FP8 generation only")
    errors = [[item.mean(ERROR) for item in groups[name]] for name in names]
    holds = [low < middle < high for low, middle, high in zip(*errors, strict=True)]
    means = " < ".join(f"{name} {fmean(values):.4f}" for name, values in zip(names, errors, strict=True))
    verdict = "holds" if all(holds) else f"holds for {sum(holds)} of {len(holds)} seeds"
    return f"Published order, error {means.replace(' < ', ', ')}: BF16 < FP8 both < FP8 generation only {verdict}."


def curves(found: Sequence[Measured], metric: str) -> dict[str, list[tuple[float, float]]]:
    """By setting, the mean over the seeds at each step that has the metric."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, items in by_setting(found).items():
        for step in range(min(len(item.records) for item in items)):
            metrics = [item.records[step].metrics for item in items]
            values = [values[metric] for values in metrics if metric in values]
            if values:
                lines.setdefault(name, []).append((float(step), fmean(values)))
    return lines


def spread(values: Sequence[float], form: str) -> str:
    ends = Spread.of(values)
    return f"{fmean(values):{form}} ({ends.least:{form}} to {ends.greatest:{form}})"
