"""`specrl bench run`: take the steps of all uses in turn, then write the rows and the page."""

from __future__ import annotations

import os
from collections.abc import Sequence

from specrl.bench.interleaved.energy import EnergyMeter
from specrl.bench.job import BenchJob
from specrl.bench.pages import hardware, write_rows
from specrl.bench.run.page import write_page
from specrl.bench.run.results import Comparison, read_responses
from specrl.bench.run.settings import RunSettings
from specrl.bench.run.training import UseRun, make_context, train_in_turn
from specrl.bench.uses import PLAIN
from specrl.config import Config, ConfigError
from specrl.models.shapes import model_shape
from specrl.projection.budgets import rank_of, stage_budgets


def main(job: BenchJob) -> None:
    """Train with every use in every precision, and write the rows and the page."""
    settings = RunSettings.model_validate(job.settings)
    # All contexts are made before the first training, so that what cannot work is refused at once.
    groups = [
        (precision, [(name, folder_name(name, precision, number)) for name in group])
        for precision in settings.precisions
        for number, group in enumerate(settings.groups)
    ]
    contexts = {
        folder: make_context(job, job.folder / folder, name, precision, settings)
        for precision, group in groups
        for name, folder in group
    }
    for _, group in groups:
        check_memory([contexts[folder].config for _, folder in group])
    meter = EnergyMeter()
    found: list[Comparison] = []
    for precision, group in groups:
        chosen = {name: contexts[folder] for name, folder in group}
        runs = train_in_turn(chosen, precision, settings.warm_up + settings.steps, meter)
        known = {(item.run.name, item.run.precision) for item in found}
        found += [item for item in compare(runs, settings.warm_up) if (item.run.name, precision) not in known]
        machine = {"hardware": hardware(settings.ranks * settings.threads)}
        rows = [{**item.row(), **machine} for item in found]
        write_rows(job.json_path, rows)  # what is measured stays if the next group fails
    write_page(job, settings, found, meter.source)


def check_memory(configs: Sequence[Config]) -> None:
    """Check that trainings which are in memory at the same time fit into that of this machine.

    Raises:
        ConfigError: They do not. Linux would kill one of their ranks, in the middle of the benchmark.
    """
    budgets = [
        (config.resources_of("train").ranks, budget)
        for config in configs
        for budget in stage_budgets("train", rank_of(config, "train", model_shape(config.model)))
    ]
    needed = sum(ranks * budget.needed_gib for ranks, budget in budgets if budget.place == "host")
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if needed > present:
        raise ConfigError(
            f"{len(configs)} trainings at once need {needed:.0f} GiB of memory, and this machine has {present:.0f}: "
            "choose fewer at once with --together (at least 2), fewer --ranks, or a run with a smaller "
            "engine.kv_cache_gib"
        )


def folder_name(name: str, precision: str, group: int) -> str:
    """Return the name of the folder of a use's training, which is that of a configuration as well."""
    return f"{precision}-{group}-{name.replace('/', '-').replace('+', '-')}"


def compare(runs: dict[str, UseRun], warm_up: int) -> list[Comparison]:
    """Return each training beside that of plain decoding in the same rounds; plain decoding itself comes first."""
    plain = runs[PLAIN]
    responses = {name: read_responses(run.rollouts_dir) for name, run in runs.items()}
    return [Comparison(run, plain, warm_up, responses[name], responses[PLAIN]) for name, run in runs.items()]
