"""The page of `specrl bench precision`: the table, the test of the published order, and reward and error by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from specrl.artifacts import CalibrateResult
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.precision.runs import PrecisionRun
from specrl.bench.settings import PrecisionSettings
from specrl.bench.tables import markdown_table, spread
from specrl.report.plots import line_charts

ERROR, BULK = "mismatch/token_mult_prob_error", "mismatch/bulk_error"
RATE = "performance/training_tokens_per_s"
KV_SECONDS = "timing/kv_scales_s"
PARITY = "refit/mean_abs_logprob_diff"
LEGEND = """
Figures are means over the seeds, the least and the greatest in brackets. *error* is token_mult_prob_error, the mean
over a step's tokens of exp(|log p_training - log p_generation|), over all steps; *bulk* leaves out the largest
thousandth of a step's tokens, and *worst step* is the largest error of any step. *accuracy* is that on held-out prompts
after the steps, by the engine that sampled the rollouts. *acceptance length* is the drafter's on the same prompts; the
drafter always computes in BF16. *parity* is the mean |log-prob(engine) - log-prob(trainer)| of the probe after each
refit; no limit stops a setting here. *update* is the cost of training on a token against BF16, by the median tokens per
second of the steps that trained. *KV scales* is the share of a step that measuring them took, in the steps that
measured them. *engine* and *trainer* say how FP8 was computed.
"""
COLUMNS = (
    "setting",
    "correction",
    ">error",
    ">bulk",
    ">worst step",
    ">KL, nats/token",
    ">accuracy",
    ">last reward",
    ">acceptance length",
    ">parity",
    ">update",
    ">KV scales",
    ">generated tokens/s",
    ">GPU memory",
    "engine / trainer",
    ">FP8 layers",
)
"""The columns of the table."""


def write_page(
    job: BenchJob,
    settings: PrecisionSettings,
    found: Sequence[PrecisionRun],
    calibrated: CalibrateResult,
    max_kl: float,
) -> None:
    """Write the page.

    Args:
        max_kl: The budget of the calibration that all settings with FP8 use, in nats per token.
    """
    page = Page(job.page)
    page.text(heading("FP8 in generation and training", job.command, settings.threads))
    page.text(f"Run `{job.run_dir.name}`, {settings.num_steps} RL steps, seeds {', '.join(map(str, settings.seeds))}.")
    if earlier := sum(item.is_earlier for item in found):
        page.text(f"{earlier} of these {len(found)} runs are an earlier call's, of the same code, stages and settings.")
    page.text(calibration(calibrated, max_kl, found))
    page.text(table(found))
    page.text(LEGEND)
    page.text(order(found))
    for name, metric, label in (("reward", "reward/mean", "mean reward"), ("error", ERROR, "token_mult_prob_error")):
        page.plot(name, line_charts(curves(found, metric), "RL step", label), f"{label} by RL step, mean of the seeds")
    page.write()


def calibration(calibrated: CalibrateResult, max_kl: float, found: Sequence[PrecisionRun]) -> str:
    """Return in words whether the chosen layers keep the budget on prompts other than those of the choice."""
    kept = len(calibrated.bf16_layers)
    total = kept + max(item.end_result.quantised_layers for item in found)
    verdict = "within" if calibrated.kl_chosen <= max_kl else "above"
    return (
        f"Calibration: {kept} of {total} linear layers stay in BF16; KL on held-out prompts {calibrated.kl_chosen:.5f} "
        f"nats per token, {verdict} its budget of {max_kl:g} (all layers in FP8: {calibrated.kl_all_fp8:.5f})."
    )


def by_setting(found: Sequence[PrecisionRun]) -> dict[str, list[PrecisionRun]]:
    """Return the runs grouped by the name of their setting."""
    groups: dict[str, list[PrecisionRun]] = {}
    for item in found:
        groups.setdefault(item.setting.name, []).append(item)
    return groups


def table(found: Sequence[PrecisionRun]) -> str:
    """Return the figures of every setting, as means over the seeds."""
    groups = by_setting(found)
    plain = {run.seed: run for run in groups["BF16"]}
    return markdown_table(COLUMNS, [_row(runs, plain) for runs in groups.values()])


def _row(runs: Sequence[PrecisionRun], plain: Mapping[int, PrecisionRun]) -> list[str]:
    """Return one setting's row of the table; `plain` holds the BF16 run of each seed."""
    updates = [cost for run in runs if (cost := update_cost(run, plain[run.seed])) is not None]
    shares = [share for run in runs if (share := kv_scales_share(run)) is not None]
    worst = max(record.metrics.get(ERROR, 1.0) for run in runs for record in run.records)
    memory = max((run.end_result.memory_gib or 0.0) for run in runs)
    return [
        runs[0].setting.name,
        runs[0].correction,
        spread([run.mean(ERROR) for run in runs], ".4f"),
        spread([run.mean(BULK) for run in runs], ".4f"),
        f"{worst:.3f}",
        spread([run.mean("mismatch/kl") for run in runs], ".5f"),
        spread([run.end_result.accuracy for run in runs], ".1%"),
        spread([run.records[-1].metrics["reward/mean"] for run in runs], ".3f"),
        f"{fmean(run.end_result.acceptance_length for run in runs):.2f}",
        spread([run.mean(PARITY) for run in runs], ".4f"),
        f"{fmean(updates):.2f}x" if updates else "-",
        f"{fmean(shares):.1%}" if shares else "-",
        f"{fmean(run.median('performance/generation_tokens_per_s') for run in runs):.0f}",
        f"{memory:.1f} GiB" if memory else "-",
        f"{runs[0].end_result.engine_mode} / {runs[0].end_result.training_mode}",
        str(runs[0].end_result.quantised_layers),
    ]


def update_cost(item: PrecisionRun, plain: PrecisionRun) -> float | None:
    """Return the ratio of the training time per token to the seed's BF16 run, or None if a run never trained."""
    own, other = (
        [rate for record in run.records if (rate := record.metrics.get(RATE, 0.0)) > 0] for run in (item, plain)
    )
    return median(other) / median(own) if own and other else None


def kv_scales_share(item: PrecisionRun) -> float | None:
    """Return the median share of a step that KV scales took, over the steps that measured them, or None without any."""
    measured = [record.metrics for record in item.records if KV_SECONDS in record.metrics]
    return median(values[KV_SECONDS] / values["timing/step_s"] for values in measured) if measured else None


def order(found: Sequence[PrecisionRun]) -> str:
    """Return in words for how many seeds error(BF16) < error(FP8 both) < error(FP8 generation only) holds."""
    groups = by_setting(found)
    names = ("BF16", "FP8 both", "FP8 generation only")
    errors = [[item.mean(ERROR) for item in groups[name]] for name in names]
    holds = [low < middle < high for low, middle, high in zip(*errors, strict=True)]
    means = " < ".join(f"{name} {fmean(values):.4f}" for name, values in zip(names, errors, strict=True))
    verdict = "holds" if all(holds) else f"holds for {sum(holds)} of {len(holds)} seeds"
    return f"Published order, error {means.replace(' < ', ', ')}: BF16 < FP8 both < FP8 generation only {verdict}."


def curves(found: Sequence[PrecisionRun], metric: str) -> dict[str, list[tuple[float, float]]]:
    """Return (step, mean over the seeds) by setting, for the steps that have the metric."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, items in by_setting(found).items():
        for step in range(min(len(item.records) for item in items)):
            metrics = [item.records[step].metrics for item in items]
            values = [values[metric] for values in metrics if metric in values]
            if values:
                lines.setdefault(name, []).append((float(step), fmean(values)))
    return lines
