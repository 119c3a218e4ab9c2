"""The tables of `specrl project`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from specrl.projection.simulator.choices import Choice, assumptions, choices
from specrl.projection.simulator.hardware import Efficiency
from specrl.projection.simulator.published import PublishedRow, mean_error
from specrl.projection.simulator.step import StepModel
from specrl.report.tables import print_line, print_table

COLUMNS = (
    "generation",
    ">length",
    ">generation, s",
    ">idle",
    ">idle time used",
    ">update, s",
    ">refit, s",
    ">step, s",
    ">generation speedup",
    ">step speedup",
    ">hours",
    ">GPU-hours",
)


def print_choices(name: str, model: StepModel, rates: Sequence[float], num_steps: int) -> None:
    """Print what each number of drafts and each use of idle time would take and gain, and what is assumed.

    Args:
        rates: The share of drafts accepted at positions 1, 2, ...
        num_steps: The steps of the whole run.
    """
    console = Console()
    title = f"Simulated steps of {name} on {model.gpus} {model.hardware.name}, engines of {model.engine_gpus}"
    print_table(console, title, COLUMNS, [_cells(item, model.gpus, num_steps) for item in choices(model, rates)])
    for line in assumptions(model, rates):
        print_line(console, f"assumed: {line}")


def _cells(choice: Choice, gpus: int, num_steps: int) -> tuple[str, ...]:
    time, hours = choice.time, choice.time.total * num_steps / 3600
    return (
        choice.name,
        f"{choice.speculation.acceptance_length:.2f}",
        f"{time.generation:.1f}",
        f"{time.idle_share:.0%}",
        f"{time.used_share:.0%}",
        f"{time.logprob + time.update:.1f}",
        f"{time.refit:.2f}",
        f"{time.total:.1f}",
        f"{choice.generation_speedup:.2f}",
        f"{choice.step_speedup:.2f}",
        f"{hours:.1f}",
        f"{hours * gpus:,.0f}",
    )


def print_published(rows: Sequence[PublishedRow]) -> None:
    """Print published figures beside the simulated ones, and how far those are off that were not chosen on."""
    console = Console()
    columns = ("setting", "quantity", ">published", ">simulated", ">ratio", "constants chosen on it")
    cells = [
        (
            row.setting,
            row.quantity,
            f"{row.published:.2f}",
            "" if row.predicted is None else f"{row.predicted:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "yes" if row.chosen_on else "no",
        )
        for row in rows
    ]
    print_table(console, "Published results (arXiv:2604.26779) and the simulator", columns, cells)
    by_k = f"k = 3: {mean_error(rows, (3,)):.0%}; k = 5 and 7: {mean_error(rows, (5, 7)):.0%}"
    print_line(console, f"mean absolute error of the rows that are predicted: {mean_error(rows):.0%} ({by_k})")
    print_line(console, "empty: too little of the setting is known to simulate it")
    for line in Efficiency().lines():
        print_line(console, f"assumed: {line}")
