"""The page of `specrl bench run`, made from rows alone, so that several jobs can share one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specrl.artifacts import write_text
from specrl.bench.job import BenchJob
from specrl.bench.pages import Rows, table, titled, write_results
from specrl.projection.simulator.measured import GPUS, DraftCounts, step_seconds
from specrl.report.plots import line_chart

HOW = """
Every cell starts from the run's policy before RL and trains with its own ranks, engine and optimizer, on the same
prompts with the same seeds. {order}
All ratios are against **{baseline}** with the same seed, per response token; above 1 the cell is faster.
*generation* and *step* (without validations) are medians over the counted steps, with the lowest and highest ratio of
any step. *end to end* covers the whole training: the start of its ranks, all steps and their validations, but not the
pretraining of a drafter. *decoding steps* is the ratio of engine iterations per token, counted on the rank that needed
the most. *same* is the share of responses whose tokens equal the baseline's.
"""
IN_TURN = "Cells take one step each in turn, in an order that changes every round; while one works, the others wait."
APART = "They were trained one after the other, so counts can be compared, but times cannot."
NAMES = titled("cell", "seed")
SPEED = titled("generation", "step") | {"end to end": "end_to_end_ratio", "decoding steps": "decode_step_ratio"}
SPEED |= titled("acceptance_length") | {"same": "same_responses"}
ON_GPUS = {name: f"{name}_per_token" for name in ("iterations", "drafted", "passes")}
ON_GPUS |= {"stored accepted": "replay_accepted", "recent accepted": "recent_accepted"}
STEPS = {f"{gpus} GPUs": f"step_{gpus}_gpus_by_epoch" for gpus in GPUS}
ON_GPUS |= STEPS
SCALED = """
## On GPUs

Per response token of the counted steps: *iterations* of the engine that needed the most, *drafted* positions including
padding, and *passes* of the drafter; then the accepted share of the tokens drafted from *stored* and from *recent*
text. From these counts, the speedup of a step of Qwen3-8B on H100 GPUs over plain decoding is projected, epoch by
epoch. Response lengths are sampled, and responses end one after the other. Cells that draft from text generated in
idle time are not projected, because its amount depends on the idle time of the ranks measured here. `specrl project`
prints the assumptions.
"""
IDLE = """
The same steps with idle time used, simulated for that many engines: engines that have finished generate text for the
next step, with its seeds. How long a response *agrees* with this text after the update is an assumption; `specrl bench
rollouts --after-update` measures it. The text is processed like a prompt, many tokens per pass.
"""
AGREES = {"100 tokens": 100.0, "1000 tokens": 1000.0, "to its end": float("inf")}
LEARNED = {
    **{"mean reward": "reward_mean", "difference": "reward_difference", "accuracy": "accuracy"},
    **{"better, worse": "better_and_worse_prompts", "p": "p_value", "token_mult_prob_error": "token_mult_prob_error"},
    **{"KL": "kl", "rewards by step": "reward_by_step"},
}
LEARNING = """
*accuracy* is the final accuracy on the held-out prompts; *better, worse* counts the prompts on which it is above and
below the baseline's, if both have the same prompts, sampling and scoring; *p* is the p-value of the sign test between
the two (McNemar's test if rewards are 0 or 1).
"""
PARTS = ("step_s", "generation_s", "policy_update_s", "drafter_update_s", "refit_s")
SECONDS = {name: f"timing/{name}" for name in PARTS} | {"idle_s": "bubble/idle_s", "idle_used_s": "bubble/used_s"}
"""Columns that are medians over the counted steps, and their metrics."""


def write_run_page(job: BenchJob, rows: Rows, failed: Mapping[str, str] | None = None) -> None:
    """Write the rows and the page, with the errors of `failed` cells by label."""
    sections = [
        HOW.format(
            baseline=next(row["cell"] for row in rows if row["is_baseline"]),
            order=IN_TURN if any("step_ratio" in row for row in rows) else APART,
        ),
        table(rows, NAMES | SPEED),
        SCALED + "\n" + table(rows, NAMES | ON_GPUS),
        *([IDLE + "\n" + table(idle, NAMES | titled("agrees") | STEPS)] if (idle := with_idle_time(rows)) else []),
        "\n\n".join(["## What was learned", LEARNING.strip(), table(rows, NAMES | LEARNED), *_curves(job, rows)]),
        "## Where the time goes\n\nMedians of the counted steps, and the start:\n\n"
        + table(rows, NAMES | titled(*SECONDS, "start_s")),
    ]
    if failed:
        lines = [f"- {label}: {error}" for label, error in failed.items()]
        sections.append("\n".join(["These cells failed; the same command tries them again:\n", *lines]))
    machines = "; ".join(dict.fromkeys(row["hardware"] for row in rows))
    write_results(job, rows, "Whole trainings", sections, machines)


def _curves(job: BenchJob, rows: Rows) -> list[str]:
    """Draw the accuracy over the training, if it was measured more than once."""
    curves = {
        " seed=".join(str(row[name]) for name in NAMES.values() if name in row): row["accuracy_by_step"]
        for row in rows
        if len(row.get("accuracy_by_step", ())) > 1
    }
    if not curves:
        return []
    picture = job.page.with_name(f"{job.page.stem}-accuracy.svg")
    write_text(picture, line_chart(curves, "RL step", "accuracy"))
    return [f"![Accuracy on held-out prompts by RL step, with its 95 % intervals]({picture.name})"]


def on_gpus(epochs: Sequence[DraftCounts], drafter_updates: float, carried: float = 0.0) -> dict[str, list[float]]:
    """Make the columns of projected speedups by epoch; the arguments are those of `step_seconds`."""
    found = {}
    for gpus in GPUS:
        plain_s = step_seconds(DraftCounts(), gpus)
        found[f"step_{gpus}_gpus_by_epoch"] = [
            plain_s / step_seconds(epoch, gpus, drafter_updates, carried) for epoch in epochs
        ]
    return found


def with_idle_time(rows: Rows) -> list[dict[str, Any]]:
    """Make rows for cells that draft from text, as if idle engines generated text for the next step."""
    names = [name for name in NAMES.values() if name in rows[0]]
    return [
        {**{name: row[name] for name in names}, "agrees": agrees, **columns}
        for row in rows
        for agrees, columns in row.get("with_idle_time", {}).items()
    ]
