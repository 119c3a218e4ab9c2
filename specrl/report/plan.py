"""The tables of `specrl run --dry-run`."""

from __future__ import annotations

from rich.console import Console

from specrl.projection.budgets import Budget
from specrl.projection.plan import Plan, PlannedJob
from specrl.report.tables import print_line, print_table


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print tables of the jobs, of each kind of memory by stage, and of a step's transfers; then the notes."""
    console = console or Console()
    shape = plan.shape
    active = f", {shape.active_parameters / 1e9:.2f} G of them for each token" if shape.num_experts else ""
    print_line(
        console,
        f"run {plan.name}: {plan.model}, {shape.parameters / 1e9:.2f} G parameters{active} "
        f"({shape.num_layers} layers, hidden {shape.hidden_size}, vocabulary {shape.vocab_size})",
    )
    print_line(console, "\n".join(plan.algorithms) + "\n")
    columns = ("stage", ">nodes", ">ranks", ">GPUs", ">CPUs", ">host GiB", ">minutes", "partition")
    print_table(console, "Jobs", columns, [_job_row(job) for job in plan.jobs])
    for job in plan.jobs:
        if job.options:
            print_line(console, f"{job.stage}: {job.options}")
    for place in dict.fromkeys(budget.place for budget in plan.budgets):
        _print_place(console, place, [budget for budget in plan.budgets if budget.place == place])
    _print_traffic(console, plan)
    checkpoint = plan.checkpoint
    print_line(
        console,
        f"checkpoint: {checkpoint.gib:.1f} GiB; a step waits {checkpoint.copy_s:.1f} s for its copy, and it is written "
        f"in {checkpoint.write_s:.0f} s beside the next; at most {checkpoint.number} at a time",
    )
    print_line(console, "assumed: " + "; ".join(plan.speeds.lines))
    for note in plan.notes:
        print_line(console, f"note: {note}")


def _job_row(job: PlannedJob) -> tuple[str, ...]:
    numbers = (job.nodes, job.ranks, job.gpus, job.cpus, job.memory_gib, job.minutes)
    return (job.stage, *("not asked for" if number is None else f"{number:g}" for number in numbers), job.partition)


def _print_place(console: Console, place: str, budgets: list[Budget]) -> None:
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
    columns = ("item", *(f">{budget.stage}" for budget in budgets), "how")
    print_table(console, f"Memory of one rank in GiB: {place}", columns, rows)


def _print_traffic(console: Console, plan: Plan) -> None:
    rows: list[tuple[str, ...]] = []
    for item in plan.traffic:
        numbers = (item.inside_gib, item.network_gib, item.seconds(plan.speeds))
        rows.append((item.name, *(f"{number:.2f}" for number in numbers), item.how))
    sums = (
        sum(item.inside_gib for item in plan.traffic),
        sum(item.network_gib for item in plan.traffic),
        sum(item.seconds(plan.speeds) for item in plan.traffic),
    )
    rows.append(("all", *(f"{number:.2f}" for number in sums), "for one rank"))
    columns = ("item", ">in the node, GiB", ">network, GiB", ">seconds", "how")
    print_table(console, "Received by one rank in a step of training", columns, rows)
