"""The tables of `specrl run --dry-run` and of `specrl project`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from specrl.config import STAGES, Config, StageName
from specrl.projection.budgets import Budget
from specrl.projection.memory import MARGIN
from specrl.projection.plan import Plan
from specrl.projection.simulator.choices import Choice, assumptions, choices, ideas
from specrl.projection.simulator.engine import Efficiency
from specrl.projection.simulator.published import PublishedRow, mean_error
from specrl.projection.simulator.step import StepModel
from specrl.projection.traffic import Transfer
from specrl.report.tables import print_line, print_table


def print_plan(plan: Plan, options: Mapping[StageName, str], console: Console | None = None) -> None:
    """Print tables of jobs, of each kind of memory by stage, and of a step's transfers, then the notes.

    `options` says how each stage's job is submitted, in the scheduler's terms.
    """
    shape, config = plan.shape, plan.config
    active = f", {shape.active_parameters / 1e9:.2f} G of them for each token" if shape.num_experts else ""
    print_line(
        f"run {config.name}: {config.model.source}, {shape.parameters / 1e9:.2f} G parameters{active} "
        f"({shape.num_layers} layers, hidden {shape.hidden_size}, vocabulary {shape.vocab_size})",
        console,
    )
    print_line("\n".join(plan.algorithms) + "\n", console)
    columns = ("stage", ">nodes", ">ranks", ">GPUs", ">CPUs", ">host GiB", ">minutes", "partition")
    print_table("Jobs", columns, [_job_row(config, stage) for stage in STAGES], console)
    for stage, words in options.items():
        if words:
            print_line(f"{stage}: {words}", console)
    for place in dict.fromkeys(budget.place for budget in plan.budgets):
        _print_place(console, place, [budget for budget in plan.budgets if budget.place == place])
    if any(config.resources_of(stage).gpus_per_rank for stage in STAGES):
        _print_traffic(console, plan)
    for note in plan.notes:
        print_line(f"note: {note}", console)


def _job_row(config: Config, stage: StageName) -> tuple[str, ...]:
    asked, cluster = config.resources_of(stage), config.cluster_of(stage)
    each = (asked.gpus_per_rank, asked.cpus_per_rank, asked.memory_gib_per_rank)
    gpus, cpus, memory = (f"{asked.ranks * number:g}" for number in each)
    memory = memory if cluster.request_memory else "not asked for"
    place = cluster.partition or cluster.backend
    return (stage, str(asked.nodes), str(asked.ranks), gpus, cpus, memory, f"{asked.minutes:g}", place)


def _print_place(console: Console | None, place: str, budgets: list[Budget]) -> None:
    by_stage = [{item.name: item for item in budget.items} for budget in budgets]
    rows = []
    for name in dict.fromkeys(name for items in by_stage for name in items):
        largest = max((items[name] for items in by_stage if name in items), key=lambda item: item.gib)
        cells = [f"{items[name].gib:.2f}" if name in items else "" for items in by_stage]
        phase = f" (only in the {largest.phase} phase)" if largest.phase else ""
        rows.append((name, *cells, largest.how + phase))
    needed = [f"{budget.needed_gib:.2f}" for budget in budgets]
    rows.append(("needed", *needed, "items of the whole stage and of the largest phase"))
    rows.append(("a rank has", *(f"{budget.available_gib:.2f}" for budget in budgets), ""))
    if place.startswith("GPU, trainer"):
        free = [f"{budget.available_gib - budget.needed_gib:.2f}" for budget in budgets]
        rows.append(("free on the GPU", *free, f"shipped configurations leave {MARGIN:.0%} of a GPU"))
    columns = ("item", *(f">{budget.stage}" for budget in budgets), "how")
    print_table(f"Memory of one rank in GiB: {place}", columns, rows, console)


def _print_traffic(console: Console | None, plan: Plan) -> None:
    figures = ("inside_gib", "network_gib", "seconds")
    inside, network, seconds = (sum(getattr(item, figure) for item in plan.traffic) for figure in figures)
    rows = [
        (item.name, *(f"{getattr(item, figure):.2f}" for figure in figures), item.how)
        for item in (*plan.traffic, Transfer("all", inside, network, seconds, "for one rank"))
    ]
    columns = ("item", ">in the node, GiB", ">network, GiB", ">seconds", "how")
    print_table("Received by one rank in a training step", columns, rows, console)
    checkpoint = plan.checkpoint
    print_line(
        f"checkpoint: {checkpoint.gib:.1f} GiB; a step waits {checkpoint.copy_s:.1f} s for its copy, and it is written "
        f"in {checkpoint.write_s:.0f} s beside the next; at most {checkpoint.number} at a time",
        console,
    )
    print_line("assumed: " + "; ".join(plan.assumed), console)


def print_choices(name: str, model: StepModel, rates: Sequence[float], num_steps: int) -> None:
    """Print the times and gains of each draft length and each use of idle time, and the assumptions."""
    title = f"Simulated steps of {name} on {model.gpus} {model.engine.hardware.name}, engines of {model.engine.gpus}"
    found = [_cells(item, model.gpus, num_steps) for item in choices(model, rates)]
    print_table(title, list(found[0]), [list(row.values()) for row in found])
    none, alone, together = ideas(model, rates)
    plain, best = (min(time.total for time in times.values()) for times in (none, alone))
    rows = []
    for idea, time in {**none, **alone, **together}.items():
        speedups = (f"{other / time.total:.2f}" for other in (plain, best))
        rows.append((idea, f"{time.generation:.1f}", f"{time.total:.1f}", *speedups))
    columns = ("idea", ">generation, s", ">step, s", ">step speedup", ">over the best alone")
    print_table("Each idea alone, and together", columns, rows)
    for line in assumptions(model, rates):
        print_line(f"assumed: {line}")


def _cells(choice: Choice, gpus: int, num_steps: int) -> dict[str, str]:
    time, hours = choice.time, choice.time.total * num_steps / 3600
    return {
        "generation": choice.name,
        ">length": f"{choice.speculation.acceptance_length:.2f}",
        ">generation, s": f"{time.generation:.1f}",
        ">idle": f"{time.idle_share:.0%}",
        ">idle time used": f"{time.used_share:.0%}",
        ">update, s": f"{time.logprob + time.update:.1f}",
        ">drafter, s": f"{time.drafter:.2f}",
        ">refit, s": f"{time.refit:.2f}",
        ">step, s": f"{time.total:.1f}",
        ">generation speedup": f"{choice.generation_speedup:.2f}",
        ">step speedup": f"{choice.step_speedup:.2f}",
        ">hours": f"{hours:.1f}",
        ">GPU-hours": f"{hours * gpus:,.0f}",
    }


def print_published(rows: Sequence[PublishedRow]) -> None:
    """Print published and simulated figures, and the mean error of the predicted ones."""
    columns = ("setting", "quantity", ">published", ">simulated", ">ratio", "constants chosen on it")
    cells = []
    for row in rows:
        figures = (f"{figure:.2f}" for figure in (row.published, row.predicted, row.ratio))
        cells.append((row.setting, row.quantity, *figures, "yes" if row.chosen_on else "no"))
    print_table("Published results (arXiv:2604.26779) and the simulator", columns, cells)
    by_k = f"k = 3: {mean_error(rows, (3,)):.0%}; k = 5 and 7: {mean_error(rows, (5, 7)):.0%}"
    print_line(f"mean absolute error of the rows that are predicted: {mean_error(rows):.0%} ({by_k})")
    for line in Efficiency().lines():
        print_line(f"assumed: {line}")
