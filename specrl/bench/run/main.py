"""`specrl bench run`: train all cells in turn, step by step, then write the rows and the page."""

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
    """Train every cell, group by group, and write the rows and the page after each group."""
    rows: dict[str, dict[str, Any]] = {}  # by cell label; a baseline is measured with each of its groups
    subject, steps = job.subject, options.warm_up + options.steps
    # All trainings are prepared before the first starts, so that mistakes are reported at once.
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
        write_run_page(job, list(rows.values()))  # results stay if the next group fails


def check_memory(configs: Sequence[Config]) -> None:
    """Check that this machine has enough memory for trainings that run at the same time."""
    needed, present = sum(map(_needed_gib, configs)), machine_gib()
    if needed > present:
        raise ConfigError(
            f"{len(configs)} trainings at once need {needed:.1f} GiB of memory, and this machine has {present:.1f}: "
            "choose fewer with --together, fewer ranks, or a smaller engine.kv_cache_gib"
        )


def fitting(config: Config, most: int) -> int:
    """The number of such trainings that this machine has the memory for at once; one is always tried."""
    return max(1, min(most, int(machine_gib() / _needed_gib(config))))


def planned_gib(config: Config, place: str) -> float:
    """The memory of a kind that the plan gives a rank of a training; `place` as in `Budget`."""
    budgets = stage_budgets(rank_of(config, "train", model_shape(config.model)))
    return sum(own.needed_gib for own in budgets if own.place == place)


def _needed_gib(config: Config) -> float:
    return config.resources_of("train").ranks * planned_gib(config, "host")
