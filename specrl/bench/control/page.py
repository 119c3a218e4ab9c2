"""The page of `specrl bench control`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.bench.control.ablation import Efficiency, Worth
from specrl.bench.control.bubbles import BubbleTrace
from specrl.bench.control.machine import Machine, error_on_both_sources, mean_noise
from specrl.bench.control.recording import Recording
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.tables import Spread, markdown_table
from specrl.rollout.control import ControlSettings

EXPLANATION = """
The engine ran once, to record: responses to held-out prompts, for each of their tokens how many tokens of a draft made
there would have been accepted, text stored for the same prompts, and the seconds of iterations at fixed draft lengths.
Everything below is a replay of that by the project's own controller, estimates, text sources and text acceptance, token
by token. What is accepted is exact, because a response does not depend on its drafts; times are a fit to the recorded
ones, to which the controller sees the recorded noise added. A score is tokens per second of expected time.
"""
TABLE = """
Tokens per second with another value over those with the constant's own, the same seeds on both sides: geometric mean
over all workloads, median of {seeds} seeds with the least and the greatest; and the workloads on which the other value
does worst and best.
"""


@dataclass(frozen=True)
class ControlFindings:
    """Everything that the page shows."""

    recording: Recording
    machine: Machine
    efficiencies: Mapping[str, Efficiency]
    """The controller against fixed draft lengths, by workload."""
    controller: Sequence[Worth]
    """The worth of other values of the controller's constants."""
    text: Sequence[Worth]
    """The worth of other values of the constants of drafts from text."""
    shares: Sequence[Worth]
    """The worth of other values of the constants of sharing idle time, by accepted tokens instead of tokens per second;
    empty without recorded bubbles."""
    bubbles: BubbleTrace
    """The recorded bubbles."""
    num_seeds: int
    """The number of seeds of each replay."""
    seconds: float
    """The wall time of the benchmark."""


def write_page(job: BenchJob, findings: ControlFindings) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading("what the constants of the drafting control are worth", job.command, findings.recording.threads))
    page.text(EXPLANATION)
    page.text(_recorded(findings))
    page.text("## Against fixed draft lengths\n\n" + _against_fixed(findings.efficiencies))
    page.text("## Constants of the controller\n\n" + TABLE.strip().format(seeds=findings.num_seeds))
    page.text(_table(findings.controller))
    k = min(3, findings.recording.longest_draft)
    page.text(f"## Constants of drafts from text\n\nThe same at fixed draft lengths, {k} and 16 tokens.")
    page.text(_table(findings.text))
    if findings.shares:
        page.text(_bubbles(findings))
    page.write()


def _recorded(findings: ControlFindings) -> str:
    recording, machine = findings.recording, findings.machine
    tokens = sum(len(response.tokens) for response in recording.responses)
    iterations = sum(len(run) for run in recording.iterations)
    k, one_pass = min(3, recording.longest_draft), ", all in one pass of the drafter" if recording.parallel else ""
    return (
        f"Recorded: {len(recording.responses)} responses with {tokens} tokens; {iterations} iterations, whose times "
        f"differ from the fit by {machine.spread():.2f} (standard deviation of the log), {mean_noise(machine):.1%} "
        f"longer on average; iterations with drafts of both sources, which are not fitted, took "
        f"{error_on_both_sources(machine, recording.iterations):+.1%} against the fit. One request: "
        f"{1e3 * machine.seconds(1, 0, 0):.0f} ms, with a draft of {k} tokens{one_pass}, "
        f"{1e3 * machine.seconds(1, k, k):.0f} ms; "
        f"32 requests: {1e3 * machine.seconds(32, 0, 0):.0f} and {1e3 * machine.seconds(32, 32 * k, k):.0f} ms. "
        f"The replays took {findings.seconds:.0f} s."
    )


def _against_fixed(efficiencies: Mapping[str, Efficiency]) -> str:
    rows = [
        [name, f"{item.best.k} + {item.best.replay_k}", _spread(item.against_best), _spread(item.against_none)]
        for name, item in efficiencies.items()
    ]
    columns = ("workload", "best fixed lengths", ">tokens/s against these", ">against no drafts")
    return (
        "Tokens per second of the controller, all that it tries included, over those of the best draft lengths in "
        "hindsight (drafter's + text's) and over those of plain decoding:\n\n" + markdown_table(columns, rows)
    )


def _table(worths: Sequence[Worth]) -> str:
    columns = ("constant", ">value", ">other", ">ratio", ">range", "worst on", "best on")
    own = ControlSettings()
    rows = [
        [
            f"`{worth.alternative.name}`",
            _value(getattr(own, worth.alternative.name)),
            _value(worth.alternative.value),
            f"{worth.ratio.median:.3f}",
            f"{worth.ratio.least:.3f} - {worth.ratio.greatest:.3f}",
            f"{worth.worst[0]} {worth.worst[1]:.3f}",
            f"{worth.best[0]} {worth.best[1]:.3f}",
        ]
        for worth in worths
    ]
    return markdown_table(columns, rows)


def _bubbles(findings: ControlFindings) -> str:
    bubbles = findings.bubbles
    return (
        "## Sharing idle time\n\n"
        f"The bubbles of {len(bubbles.seconds)} steps of `specrl bench bubbles` with `both`, replayed in random order "
        f"with what pre-generation brought in {len(bubbles.pregeneration)} of them and training in "
        f"{len(bubbles.training)}: accepted tokens that the use of the bubbles brought, with another value over those "
        "with the constant's own.\n\n" + _table(findings.shares)
    )


def _spread(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.least:.3f} - {spread.greatest:.3f})"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
