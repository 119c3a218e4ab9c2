"""The page of `specrl bench bubbles`: the table, drafts by source, the drafter and Gantt charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specrl.bench.bubbles.runs import OTHER_SEEDS, SettingRun, acceptance
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.settings import BubbleSettings
from specrl.bench.tables import markdown_table
from specrl.report.gantt import gantt
from specrl.report.plots import dot_chart, line_chart
from specrl.schemas import Rollout, read_folder
from specrl.step_record import StepRecord

LEGEND = """
Ratios are against `plain`, which is synchronous decoding without speculation on the same prompts and seeds.
*throughput* is the response tokens of all ranks per second of generation; *decoding steps* are the engine iterations of
the slowest rank per token; *step* is the time of whole RL steps per token. *idle* is the share of the ranks' time until
the slowest is done in which they wait for it; *used* is the part of that time put to use, and *overrun* the share of
the step in which the slowest then waited for the others. *acceptance length* is the mean over the first and the last
three steps that have one: the drafter's on the guard's probe, which always has the same prompts and draft length; where
there is no drafter, that of stored text (for `recent`, of recent rollouts) from the second step on. *tokens* counts
those of all responses; *same text* is the share of responses equal to `plain`'s.
"""
STORED_LEGEND = """
The last column is a response's decoding steps per token after its first, which comes with the prompt: 1 is plain
decoding. Responses are grouped by how many texts were stored for their prompt when none was of their own seed; *own*
means that one was, in the end as long as the response, and *own, shorter* that it was not: it stopped with the bubble,
or the response went another way and left it behind.
"""
STORED = ("0", "1", "2 or 3", "4 or more", "own, shorter", "own")


PREGENERATING = ("pregenerate", "both", "pregenerate_other", "both_other")
"""The settings whose bubbles pre-generate."""


def write_page(
    job: BenchJob, settings: BubbleSettings, rows: Sequence[Mapping[str, Any]], runs: Mapping[str, SettingRun]
) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading("what ranks do while they wait", job.command, settings.threads))
    plain = runs["plain"]
    page.text(
        f"{settings.ranks} ranks x {settings.threads} thread(s), {settings.num_steps} steps; seeds of pre-generated "
        f"text: {_seeds(settings)}. Plain: {plain.num_tokens} tokens, {plain.tokens_per_s:.0f} "
        f"tokens/s, {plain.total('timing/step_s') / settings.num_steps:.1f} s a step."
    )
    page.text(_table(rows, runs))
    page.text(LEGEND)
    page.text("## Drafts by source")
    page.text(_sources(runs))
    if _measured_of(runs, *PREGENERATING):
        page.text("## What stored text saves")
        page.text(_stored(runs))
        page.text(STORED_LEGEND)
    _drafter_plot(page, runs)
    _update_plot(page, runs)
    page.text("## Who waited for whom")
    for name in _measured_of(runs, "none", "both"):
        record = runs[name].records[len(runs[name].records) // 2]
        page.plot(f"gantt-{name}", gantt(record.ranks), f"{name}, step {record.step}")
    page.write()


def _seeds(settings: BubbleSettings) -> str:
    """Return in words which seeds pre-generated text has, compared with the rollouts'."""
    words = {"same": "the rollouts' own", "other": "other ones than the rollouts'"}
    others = [name for name in settings.uses if name in OTHER_SEEDS]
    return words[settings.seeds] + (f", in {' and '.join(others)} {words['other']}" if others else "")


def _table(rows: Sequence[Mapping[str, Any]], runs: Mapping[str, SettingRun]) -> str:
    texts = _texts(runs["plain"].rollouts_dir)
    lines = []
    for row in rows:
        own = _texts(runs[row["use"]].rollouts_dir)
        same = sum(own[key] == tokens for key, tokens in texts.items()) / len(texts)
        lines.append(
            [
                row["use"],
                f"{row['throughput_ratio']:.2f}",
                f"{row['decode_step_ratio']:.2f}",
                f"{row['step_time_ratio']:.2f}",
                f"{row['idle_share']:.0%}",
                f"{row['used_share']:.0%}",
                f"{row['overrun_share']:.1%}",
                f"{row['acceptance_length_first']:.2f} -> {row['acceptance_length_last']:.2f}",
                str(runs[row["use"]].num_tokens),
                f"{same:.1%}",
            ]
        )
    columns = ("bubbles", ">throughput", ">decoding steps", ">step", ">idle", ">used", ">overrun")
    return markdown_table((*columns, "acceptance length", ">tokens", ">same text"), lines)


def _measured_of(runs: Mapping[str, SettingRun], *names: str) -> list[str]:
    return [name for name in names if name in runs]


def _texts(rollouts_dir: Path) -> dict[tuple[int, int, int], list[int]]:
    return {(row.step, row.prompt_id, row.sample): list(row.response_tokens) for row in read_folder(rollouts_dir)}


def _stored(runs: Mapping[str, SettingRun]) -> str:
    lines = []
    for name in _measured_of(runs, *PREGENERATING):
        counts = {kind: [0, 0, 0] for kind in STORED}
        for rollout in read_folder(runs[name].rollouts_dir):
            tokens = len(rollout.response_tokens) - 1
            found = (1, tokens, tokens - rollout.num_accepted_tokens)
            kind = stored_kind(rollout)
            counts[kind] = [total + value for total, value in zip(counts[kind], found, strict=True)]
        for kind, (responses, tokens, steps) in counts.items():
            if tokens:
                lines.append([name, kind, str(responses), str(tokens), f"{steps / tokens:.2f}"])
    return markdown_table(("bubbles", "stored", ">responses", ">tokens", ">decoding steps per token"), lines)


def stored_kind(rollout: Rollout) -> str:
    """Return which of `STORED` a response belongs to."""
    if rollout.own_stored_tokens:
        return "own" if rollout.own_stored_tokens >= len(rollout.response_tokens) else "own, shorter"
    return STORED[(0, 1, 2, 2, 3)[min(rollout.num_stored, 4)]]


def _sources(runs: Mapping[str, SettingRun]) -> str:
    lines = []
    for name, run in runs.items():
        for source in dict.fromkeys(source for record in run.records for source in record.by_source):
            counts = [record.by_source[source] for record in run.records if source in record.by_source]
            drafts, drafted, accepted = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
            if drafts:
                rate, length = accepted / drafted, 1 + accepted / drafts
                share = accepted / run.num_tokens
                lines.append([name, source, str(drafts), f"{rate:.2f}", f"{length:.2f}", f"{share:.0%}"])
    columns = ("bubbles", "drafts from", ">drafts", ">accepted of drafted", ">tokens an iteration", ">of all tokens")
    return markdown_table(columns, lines)


def _drafter_plot(page: Page, runs: Mapping[str, SettingRun]) -> None:
    for name in _measured_of(runs, "none", "train_drafter"):
        steps, lengths = zip(*acceptance(runs[name]), strict=True)
        caption = "updated while ranks wait" if name == "train_drafter" else "synchronous online update"
        page.plot(
            f"drafter-{name}", line_chart(steps, lengths, "RL step", "acceptance length, tokens"), f"Drafter, {caption}"
        )


def _update_plot(page: Page, runs: Mapping[str, SettingRun]) -> None:
    """Draw the acceptance of stored text against the gradient norm of the update before it."""
    pairs = sorted(
        (before.metrics["policy/grad_norm"], _accepted(record))
        for name in _measured_of(runs, "pregenerate", "both")
        for before, record in zip(runs[name].records, runs[name].records[1:], strict=False)
        if "replay" in record.by_source
    )
    if pairs:
        sizes, rates = zip(*pairs, strict=True)
        chart = dot_chart(sizes, rates, "gradient norm of the policy update before, unclipped", "accepted of drafted")
        page.plot("update", chart, "Acceptance of stored text against the policy's last update")


def _accepted(record: StepRecord) -> float:
    _, drafted, accepted = record.by_source["replay"]
    return accepted / drafted if drafted else 0.0
