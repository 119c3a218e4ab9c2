"""The page of `specrl bench rollouts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.rollouts.cells import Cell, Profile
from specrl.bench.rollouts.roofline import Roofline
from specrl.bench.settings import TAIL, RolloutSettings
from specrl.bench.tables import markdown_table, per_position
from specrl.report.plots import line_charts

HOW = """
Every round runs every variant once on the same requests (same prompts, weights and seeds; the order changes by round).
The speedup of a round is the ratio of its tokens per second to those of plain decoding in that round, shown as the
median of {repeats} rounds with the least and the greatest. Plain decoding has an engine of its own without a drafter;
{compiled}. `over default` is the ratio to vLLM as it comes, in a process of its own: its own sampler, scheduler and
limits, asynchronous scheduling and CUDA graphs where there is a GPU, and as many tokens after each prompt; on a CPU it
is compiled unless compiled engines were not tried. In the row of plain decoding this is the ratio of the two baselines.
At a fixed batch size the requests are held-out prompts whose responses have at least {max_tokens} tokens
and are cut there, so that the batch keeps its size; each round has other prompts, and below batch 8 there are eight of
them, one batch after another. `tail64` is 64 held-out prompts on one rank, each to its natural end ({tail}). Prefill is
part of the time. k is the longest draft; `adaptive` is the controller, after uncounted runs in which it calibrated the
batch sizes that the workload goes through, and `whole` is the same without budgets: all of every draft is verified.
Replay has one stored response per prompt, sampled from the same policy with other seeds.
"""


@dataclass(frozen=True)
class RolloutFindings:
    """The findings that the page shows."""

    cells: list[Cell]
    profiles: list[Profile]
    roofline: Roofline
    middle_k: int
    seconds: float


def write_page(job: BenchJob, settings: RolloutSettings, found: RolloutFindings) -> None:
    """Write the page."""
    page = Page(job.page)
    page.text(heading("speculative against plain rollouts", job.command, torch.get_num_threads()))
    page.text(f"Run `{job.run_dir.name}`. The benchmark took {found.seconds / 60:.1f} minutes.")
    page.text(HOW.format(**_how(settings, found.cells)))
    page.text("## Speedups")
    page.plot("speedup", speedup_plot(found.cells), "speedup by batch size")
    page.text(cell_table(found.cells))
    page.text(equality(found.cells))
    page.text("## What limits it")
    page.text(machine_text(found.roofline))
    if found.profiles:
        page.text(limit_table(found))
        page.text(share_table(found.profiles, found.middle_k))
    page.write()


def _how(settings: RolloutSettings, cells: Sequence[Cell]) -> dict[str, object]:
    plain = {cell.workload.name: cell.variant.kind for cell in cells if cell.variant.k == 0}
    variants = {cell.variant.method: cell.variant.kind for cell in cells if cell.variant.k != 0}
    if settings.compile:
        kinds = ", ".join(f"batch {name} {kind}" for name, kind in plain.items())
        others = ", ".join(f"{method} {kind}" for method, kind in variants.items())
        compiled = (
            "all run compiled or eager, whichever was faster "
            f"(plain, measured in the same rounds: {kinds}; drafting, by a pilot of the first source: {others})"
        )
    else:
        compiled = "compiled engines were not tried"
    tails = [cell for cell in cells if cell.workload.name == TAIL]
    lengths = sorted(len(tokens) for tokens in tails[0].measured.tokens) if tails else []
    tail = f"median {lengths[len(lengths) // 2]}, longest {lengths[-1]} tokens" if lengths else "not run"
    return {"repeats": settings.repeats, "max_tokens": settings.max_tokens, "compiled": compiled, "tail": tail}


def cell_table(cells: Sequence[Cell]) -> str:
    """Return speed and acceptance of every variant on every workload."""
    speeds = (">tokens/s", ">speedup", ">range", ">over default")
    columns = ("batch", "method", "k", *speeds, ">acceptance length", "by position", ">steps")
    rows = []
    for cell in cells:
        stats = cell.measured.stats
        low, high = cell.speedup.least, cell.speedup.greatest
        rows.append(
            (
                str(cell.workload.name),
                "plain" if cell.variant.k == 0 else cell.variant.method,
                str(cell.variant.k),
                f"{cell.rate:.0f}",
                f"{cell.speedup.median:.2f}",
                f"{low:.2f} - {high:.2f}",
                f"{cell.over_default.median:.2f}",
                f"{stats.acceptance_length:.2f}",
                per_position(stats.acceptance_rate_per_pos[:8]),
                str(stats.decode_steps),
            )
        )
    return markdown_table(columns, rows)


def equality(cells: Sequence[Cell]) -> str:
    """Return in words how many responses differ from those of plain decoding, and why."""
    compared = [cell for cell in cells if cell.variant.k != 0]
    wrong = sum(cell.num_differing for cell in compared)
    total = sum(len(cell.measured.tokens) for cell in compared)
    text = f"{wrong} of {total} speculative responses differ from those of plain decoding in the same round"
    if not wrong:
        return f"{text}: the two sides did the same work."
    return (
        f"{text}: rounding depends on the batch shape (and on compilation, where only one of the two is compiled), "
        "which can decide a BF16 near-tie differently. tests/exactness shows that nothing else changes a token."
    )


def machine_text(roofline: Roofline) -> str:
    """Return in words the speed of the machine and the size of the networks."""
    policy, machine = roofline.policy, roofline.machine
    size = policy.weights * policy.bytes_per_weight / 1e6
    text = (
        f"Measured with the same threads: reading {machine.bytes_per_s / 1e9:.1f} GB/s, matrix products of the "
        f"policy's shapes {machine.flops_per_s / 1e9:.0f} GFLOP/s. The policy's matrices are {size:.0f} MB, read once "
        "per iteration"
    )
    if roofline.drafter is not None:
        drafter = roofline.drafter.weights * roofline.drafter.bytes_per_weight / 1e6
        text += f"; the drafter's are {drafter:.0f} MB, read once per draft token"
    rows = machine.flops_per_s * policy.bytes_per_weight / (2 * machine.bytes_per_s)
    return (
        f"{text}. From {rows:.0f} rows on, arithmetic takes longer than reading. The roofline counts these matrices "
        "alone: no attention, no sampler, no Python."
    )


def limit_table(found: RolloutFindings) -> str:
    """Return the time of an iteration beside its roofline, by batch size."""
    k = found.middle_k
    columns = (
        "batch",
        ">plain, ms",
        ">its roofline",
        f">{found.profiles[0].method} k={k}, ms",
        ">its roofline",
        ">speedup",
        ">if both ran at their roofline",
    )
    rows = []
    for profile in found.profiles:
        plain = next(cell for cell in found.cells if cell.workload.name == profile.batch and cell.variant.k == 0)
        fast = next(
            (
                c
                for c in found.cells
                if (c.workload.name, c.variant.method, c.variant.k) == (profile.batch, profile.method, k)
            ),
            None,
        )
        if fast is None:
            continue
        line, batch = found.roofline, profile.batch
        rows.append(
            (
                str(batch),
                f"{1e3 * plain.measured.iteration_seconds:.1f}",
                f"{1e3 * line.plain_seconds(batch):.1f}",
                f"{1e3 * fast.measured.iteration_seconds:.1f}",
                f"{1e3 * line.speculative_seconds(batch, k):.1f}",
                f"{fast.speedup.median:.2f}",
                f"{line.speedup(batch, k, fast.measured.stats.acceptance_length):.2f}",
            )
        )
    if not rows:
        return f"Iterations were not compared with the roofline, because drafts of k = {k} were not measured."
    return "Milliseconds per engine iteration, measured and least possible:\n\n" + markdown_table(columns, rows)


def share_table(profiles: Sequence[Profile], k: int) -> str:
    """Return the share of each part of a speculative iteration; verification is the cost of the policy's extra rows."""
    columns = (
        "batch",
        ">iteration, ms",
        ">policy, one row each",
        ">verification",
        ">drafter",
        ">sampler",
        ">scheduler",
        ">other Python",
    )
    rows = []
    for profile in profiles:
        parts, total = profile.speculative, sum(profile.speculative.values())
        own = min(profile.plain["policy"], parts["policy"])
        shares = (own, parts["policy"] - own, parts["drafter"], parts["sampler"], parts["scheduler"], parts["other"])
        rows.append((str(profile.batch), f"{1e3 * total:.1f}", *(f"{share / total:.1%}" for share in shares)))
    mean = fmean(profile.speculative["sampler"] / sum(profile.speculative.values()) for profile in profiles)
    return (
        f"Shares of an iteration with {profiles[0].method}, k = {k}, by timers around its parts in a run of their "
        f"own, prefills included (sampler: {mean:.1%} on average):\n\n" + markdown_table(columns, rows)
    )


def speedup_plot(cells: Sequence[Cell]) -> str:
    """Draw the median speedup over the fixed batch sizes, with a line for each method and k."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        if cell.workload.name != TAIL:
            name = "plain" if cell.variant.k == 0 else f"{cell.variant.method}, k = {cell.variant.k}"
            series.setdefault(name, []).append((float(cell.workload.batch), cell.speedup.median))
    return line_charts(series, "running batch, requests (log scale)", "speedup over plain decoding", log_x=True)
