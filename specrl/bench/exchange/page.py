"""The page of `specrl bench exchange`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch

from specrl.bench.exchange.cost import ExchangeShape, exchange_cost
from specrl.bench.exchange.one_rank import ARRAYS, PICKLED, PROMPT_TOKENS, Cost
from specrl.bench.job import BenchJob
from specrl.bench.pages import Page, heading
from specrl.bench.settings import ExchangeSettings
from specrl.bench.tables import markdown_table

PARTS = ("rollouts", "log-probs", "mismatch")

WHAT = """\
*Pickled* is how ranks exchanged rollouts before: every rank gets every rollout, its text included, as a pickled list
of Python objects, then every log-prob of the trainer in the same way, and computes the disagreement of the engines over
all tokens alone. *Arrays* is what training does: every rank gets the lengths and rewards of all rollouts, the tokens
and log-probs of its own share of the training only, the trainer's log-probs of the rollouts that it writes, and sums. A
rollout is trained on where it was generated, as far as that divides the work evenly."""


def write_page(job: BenchJob, settings: ExchangeSettings, rounds: Mapping[str, Sequence[Sequence[Cost]]]) -> None:
    """Write the page.

    Args:
        rounds: By way and round, the cost of each rank.
    """
    page = Page(job.page)
    page.text(heading("what the exchange of rollouts costs", job.command, torch.get_num_threads()))
    page.text(
        f"{settings.responses} synthetic responses of {settings.tokens} tokens (standard deviation "
        f"{settings.spread:.0%}) on {settings.ranks} ranks of this machine; rounds in turn: {settings.repeats}. Each "
        "figure is that of the rank with the most, and of the seconds the median over the rounds."
    )
    page.text(WHAT)
    page.text(markdown_table(("", ">arrays", ">pickled", ">pickled / arrays"), rows(rounds)))
    page.text(in_words(settings, rounds))
    page.write()


def rows(rounds: Mapping[str, Sequence[Sequence[Cost]]]) -> list[list[str]]:
    """Return the rows of the table."""
    found = []
    for part in PARTS:
        seconds = {way: seconds_of(rounds[way], [part]) for way in rounds}
        received = {way: received_of(rounds[way], [part]) / 1e6 for way in rounds}
        found += [_row(f"{part}, s", seconds, ".3f"), _row(f"{part}, MB received", received, ".2f")]
    sent = PARTS[:2]
    found.append(_row("**rollouts and log-probs, s**", {way: seconds_of(rounds[way], sent) for way in rounds}, ".3f"))
    found.append(_row("**everything, s**", {way: seconds_of(rounds[way], PARTS) for way in rounds}, ".3f"))
    everything = {way: received_of(rounds[way], PARTS) / 1e6 for way in rounds}
    found.append(_row("**everything, MB received**", everything, ".2f"))
    peaks = {way: max(cost.peak for costs in rounds[way] for cost in costs) / 1e6 for way in rounds}
    return [*found, _row("growth of peak memory, MB", peaks, ".0f")]


def in_words(settings: ExchangeSettings, rounds: Mapping[str, Sequence[Sequence[Cost]]]) -> str:
    """Return what the plan says of the same exchange, and that both ways found the same."""
    shape = ExchangeShape(
        prompts=1,
        samples=settings.responses,
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=settings.tokens,
        ranks=settings.ranks,
    )
    planned = exchange_cost(shape)
    error, other = (rounds[way][0][0].found[name] for way, name in _ERRORS)
    return (
        f"The plan counts {planned.received / 1e6:.1f} MB received by a rank and {planned.host / 1e6:.0f} MB of host "
        f"memory for it, the generated rollouts included. Both ways find the same disagreement of the engines: a mean "
        f"of exp(|log r|) of {error:.6f} and {other:.6f}."
    )


def seconds_of(rounds: Sequence[Sequence[Cost]], parts: Sequence[str]) -> float:
    """Return the seconds of some parts: the slowest rank's, and the median over the rounds."""
    return median(max(sum(cost.seconds[part] for part in parts) for cost in costs) for costs in rounds)


def received_of(rounds: Sequence[Sequence[Cost]], parts: Sequence[str]) -> int:
    """Return the bytes that a rank received in some parts, those of the rank with the most."""
    return max(sum(cost.received[part] for part in parts) for costs in rounds for cost in costs)


def _row(name: str, values: Mapping[str, float], form: str) -> list[str]:
    arrays, pickled = values[ARRAYS], values[PICKLED]
    ratio = f"{pickled / arrays:.0f}" if arrays else "-"
    return [name, f"{arrays:{form}}", f"{pickled:{form}}", ratio]


_ERRORS = ((ARRAYS, "mismatch/token_mult_prob_error"), (PICKLED, "token_mult_prob_error"))
