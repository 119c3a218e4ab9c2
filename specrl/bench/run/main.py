"""`specrl bench run`: take the steps of all cells in turn, then write the rows and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrl.bench.job import BenchJob
from specrl.bench.options import RunOptions
from specrl.bench.pages import hardware, machine_gib
from specrl.bench.run.page import write_run_page
from specrl.bench.run.results import Results
from specrl.bench.run.trainings import make_training, train_in_turn
from specrl.config import Config, ConfigError
from specrl.models.shapes import model_shape
from specrl.projection.budgets import rank_of, stage_budgets


def main(job: BenchJob, options: RunOptions) -> None:
    """Train every cell, group by group, and write the rows and the page after each."""
    rows: dict[str, dict[str, Any]] = {}  # by the label of the cell; that of a baseline is measured with each group
    subject, steps = job.subject, options.warm_up + options.steps
    # All trainings are prepared before the first one starts, so that what cannot work is refused at once.
    groups = []
    for number, cells in enumerate(options.groups):
        rest = steps, options.validate_every, len(cells)
        folders = [job.folder / f"group-{number}" / f"cell-{place}" for place in range(len(cells))]
        groups.append([make_training(subject, *own, *rest) for own in zip(cells, folders, strict=True)])
    for group in groups:
        check_memory([training.context.config for training in group])
    baselines: dict[str, Results] = {}
    for group in groups:
        if len(group) > 1 or not all(one.was_taken(steps) for one in group):
            train_in_turn(group, steps)
        measured = [Results(training, options.warm_up) for training in group]
        baseline = measured[0] if len(group) > 1 else baselines.setdefault(measured[0].training.cell.seed, measured[0])
        machine = {"hardware": hardware(baseline.training.context.config.resources_of("train").cpus_per_rank)}
        for results in measured:
            row = results.row(baseline, in_turn=len(group) > 1) | machine
            rows.setdefault(results.training.cell.label, row)
        write_run_page(job, list(rows.values()))  # what is measured stays if the next group fails


def check_memory(configs: Sequence[Config]) -> None:
    """Check that trainings which are in memory at the same time fit into that of this machine."""
    needed, present = sum(map(_needed_gib, configs)), machine_gib()
    if needed > present:
        raise ConfigError(
            f"{len(configs)} trainings at once need {needed:.1f} GiB of memory, and this machine has {present:.1f}: "
            "choose fewer with --together, fewer ranks, or a smaller engine.kv_cache_gib"
        )


def fitting(config: Config, most: int) -> int:
    """The number of such trainings that this machine has the memory for at once; one is always tried."""
    return max(1, min(most, int(machine_gib() / _needed_gib(config))))


def _needed_gib(config: Config) -> float:
    budgets = stage_budgets(rank_of(config, "train", model_shape(config.model)))
    return config.resources_of("train").ranks * sum(own.needed_gib for own in budgets if own.place == "host")
