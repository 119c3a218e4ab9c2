"""The page of `specrl bench run`, made of its rows alone, so that rows of several jobs make one page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from specrl.artifacts import write_text
from specrl.bench.job import BenchJob
from specrl.bench.pages import Rows, table, titled, write_results
from specrl.projection.simulator.measured import GPUS, DraftCounts, step_seconds
from specrl.report.plots import line_chart

HOW = """
Every cell trains the run's policy before RL, with ranks, an engine and an optimizer of its own, on the same prompts
with the same seeds. {order}
All ratios are against **{baseline}** with the same seed, per response token, and above 1 where the cell is faster:
*generation* and *step* (without validations) are medians over the counted steps, with the least and the greatest ratio
of any step; *end to end* is the whole training, with the start of its ranks, all steps and their validations. The
pretraining of a drafter comes before it. *decoding steps* are engine iterations of the rank that needed the most, per
token, over the baseline's; *same* is the share of responses with the baseline's tokens.
"""
IN_TURN = "Cells take a step each in turn, in another order in every round; while one works, the others wait."
APART = "They were trained one after the other, so that counts can be compared, and times cannot."
NAMES = titled("cell", "seed")
SPEED = titled("generation", "step") | {"end to end": "end_to_end_ratio", "decoding steps": "decode_step_ratio"}
SPEED |= titled("acceptance_length") | {"same": "same_responses"}
ON_GPUS = {
    "iterations": "iterations_per_token",
    "drafted": "drafted_per_token",
    "passes": "passes_per_token",
    "stored accepted": "replay_accepted",
    "recent accepted": "recent_accepted",
}
STEPS = {f"{gpus} GPUs": f"step_{gpus}_gpus_by_epoch" for gpus in GPUS}
ON_GPUS |= STEPS
SCALED = """
## On GPUs

Per response token of the counted steps: *iterations* of the engine that needed most, positions *drafted*, padding
included, and *passes* of the drafter; then the share of the tokens drafted from *stored* and from *recent* text that
was accepted. The step of Qwen3-8B on H100 GPUs is projected from the counts, epoch by epoch: how many times as fast it
is as without drafts. Responses have drawn lengths, and end one after the other. A row *length by batch* stands for
cells that differ in `speculation.k` and `speculation.replay_k` alone: the engine drafts as one of them does, or
nothing, whichever brings the most tokens per second to the requests that run. Cells with text of idle time are not
projected: it is of as much idle time as their ranks had. These are no measurements; `specrl project` has the
assumptions.
"""
IDLE = """
The same steps with idle time put to use, as that many engines have it and not the ranks that were counted: engines that
have finished generate text of the next step, with its seeds. How long a response *agrees* with its text after the
update is assumed; `specrl bench rollouts --after-update` measures it. It is read ahead in passes like a prompt's.
"""
AGREES = {"100 tokens": 100.0, "1000 tokens": 1000.0, "to its end": float("inf")}
LEARNED = {
    **{"mean reward": "reward_mean", "difference": "reward_difference", "accuracy": "accuracy"},
    **{"better, worse": "better_and_worse_prompts", "p": "p_value", "token_mult_prob_error": "token_mult_prob_error"},
    **{"KL": "kl", "rewards by step": "reward_by_step"},
}
LEARNING = """
*accuracy* is that on the held-out prompts at the end, *better, worse* the numbers of those on which it is above and
below the baseline's, and *p* that of the sign test between them (McNemar's, where rewards are 0 or 1).
"""
SECONDS = {
    "step_s": "timing/step_s",
    "generation_s": "timing/generation_s",
    "policy_update_s": "timing/policy_update_s",
    "drafter_update_s": "timing/drafter_update_s",
    "refit_s": "timing/refit_s",
    "idle_s": "bubble/idle_s",
    "idle_used_s": "bubble/used_s",
}
"""Columns that are medians of the counted steps, with their metrics."""


def write_run_page(job: BenchJob, rows: Rows, failed: Mapping[str, str] | None = None) -> None:
    """Write rows and page, with the errors of `failed` cells by label."""
    sections = [
        HOW.format(
            baseline=next(row["cell"] for row in rows if row["is_baseline"]),
            order=IN_TURN if any("step_ratio" in row for row in rows) else APART,
        ),
        table(rows, NAMES | SPEED),
        SCALED + "\n" + table([*rows, *by_batch(rows)], NAMES | ON_GPUS),
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
    """The picture of accuracy over the training, where it was measured more than once."""
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


def on_gpus(
    epochs: Iterable[Sequence[DraftCounts]], drafter_updates: float, carried: float = 0.0
) -> dict[str, list[float]]:
    """Columns with a figure for each epoch; the arguments are those of `step_seconds`."""
    lengths = [tuple(epoch) for epoch in epochs]
    found = {}
    for gpus in GPUS:
        plain_s = step_seconds((DraftCounts(),), gpus)
        seconds = [step_seconds(one, gpus, drafter_updates, carried) for one in lengths]
        found[f"step_{gpus}_gpus_by_epoch"] = [plain_s / step for step in seconds]
    return found


def with_idle_time(rows: Rows) -> list[dict[str, Any]]:
    """Rows of the cells that draft from text, as if idle engines generated text ahead for them."""
    names = [name for name in NAMES.values() if name in rows[0]]
    return [
        {**{name: row[name] for name in names}, "agrees": agrees, **columns}
        for row in rows
        for agrees, columns in row.get("with_idle_time", {}).items()
    ]


def by_batch(rows: Rows) -> list[dict[str, Any]]:
    """A row for each family of cells that differ in their draft lengths alone, whose engine chooses between them.

    It may draft nothing, too. Cells that already choose on the machine that counts are in no family.
    """
    families: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("family") is not None:
            families.setdefault(tuple(row["family"]), []).append(row)
    return [_family(members) for members in families.values()]


def _family(rows: Rows) -> dict[str, Any]:
    found = [[DraftCounts(**one | {"paces": tuple(one["paces"])}) for one in row["drafts_by_epoch"]] for row in rows]
    epochs = ((epoch[0].undrafted, *epoch) for epoch in zip(*found, strict=True))
    seed = {name: rows[0][name] for name in ("seed",) if name in rows[0]}
    return {"cell": _name(rows), **seed, **on_gpus(epochs, rows[0]["drafter_updates"])}


def _name(rows: Rows) -> str:
    words = zip(*([word.strip(",") for word in row["cell"].split()] for row in rows), strict=False)
    common = " ".join(alike[0] for alike in takewhile(lambda alike: len(set(alike)) == 1, words))
    return ", ".join(filter(None, (common, "length by batch")))
