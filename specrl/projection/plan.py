"""The plan of a run before anything is submitted: its jobs, and the memory that each rank needs and has.

`plan` reads only the configuration and the `config.json` of a local model; it needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from specrl.config import STAGES, Config, ConfigError, StageName
from specrl.models.shapes import ModelShape, model_shape
from specrl.projection.budgets import Budget, check_kv, overflow, stage_budgets
from specrl.projection.memory import Rank
from specrl.report.tables import print_line, print_table

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The channels of a head for which vLLM has CPU kernels."""


@dataclass(frozen=True)
class PlannedJob:
    """The job of one stage; all counts are of the whole job."""

    stage: StageName
    nodes: int
    ranks: int
    gpus: int
    cpus: int
    memory_gib: float
    """The host memory, in GiB."""
    minutes: int
    """The wall-clock limit, in minutes."""
    partition: str
    """Where the job waits, in the scheduler's words."""
    options: str
    """The options with which the job is submitted, in the scheduler's words; empty without any."""


@dataclass(frozen=True)
class Plan:
    """The jobs and the memory of a run."""

    name: str
    """The run's name."""
    model: str
    """The model's source."""
    shape: ModelShape
    jobs: tuple[PlannedJob, ...]
    budgets: tuple[Budget, ...]
    algorithms: tuple[str, ...]
    """What becomes of long prompts, the reward and each chosen algorithm, with its options."""
    notes: tuple[str, ...]
    """Lines about what will run, but perhaps more slowly than intended."""


def plan(
    config: Config, queues: Mapping[StageName, str] | None = None, options: Mapping[StageName, str] | None = None
) -> Plan:
    """Return the jobs and the memory of a run.

    Args:
        queues: Where the job of each stage waits, in the scheduler's words; the partitions by default.
        options: The options with which the job of each stage is submitted, in the scheduler's words.

    Raises:
        ConfigError: The model's shape is unknown or does not fit the configuration, or a rank needs more than it has.
    """
    shape = model_shape(config.model)
    problems = _shape_problems(config, shape)
    budgets: list[Budget] = []
    notes: list[str] = []
    for stage in STAGES:
        rank = _rank(config, stage, shape)
        budgets += stage_budgets(stage, rank)
        kv_problems, kv_notes = check_kv(stage, rank)
        problems += kv_problems
        notes += kv_notes
    problems += [overflow(budget) for budget in budgets if budget.needed_gib > budget.available_gib]
    if problems:
        raise ConfigError("\n".join(problems))
    jobs = tuple(_job(config, stage, (queues or {}).get(stage), (options or {}).get(stage, "")) for stage in STAGES)
    return Plan(config.name, config.model.source, shape, jobs, tuple(budgets), _algorithms(config), tuple(notes))


def _algorithms(config: Config) -> tuple[str, ...]:
    """Return a line for long prompts, for the reward and for each chosen algorithm with its options."""
    chosen = [f"{registry.key} = {algorithm}" for registry, algorithm in config.train.algorithms]
    overlong = f"data.overlong = {config.data.overlong}, for prompts of more than {config.max_prompt_tokens} tokens"
    return (overlong, f"data.reward = {config.data.reward}", *chosen)


def _job(config: Config, stage: StageName, queue: str | None, options: str) -> PlannedJob:
    asked = config.resources_of(stage)
    return PlannedJob(
        stage=stage,
        nodes=asked.nodes,
        ranks=asked.ranks,
        gpus=asked.ranks * asked.gpus_per_rank,
        cpus=asked.ranks * asked.cpus_per_rank,
        memory_gib=asked.ranks * asked.memory_gib_per_rank,
        minutes=asked.minutes,
        partition=queue or config.cluster_of(stage).partition or "default",
        options=options,
    )


def _rank(config: Config, stage: StageName, shape: ModelShape) -> Rank:
    asked = config.resources_of(stage)
    shards = config.policy.tensor_parallel * config.policy.pipeline_parallel
    return Rank(shape, config, asked.gpus_per_rank, max(asked.ranks // shards, 1))


def _shape_problems(config: Config, shape: ModelShape) -> list[str]:
    """Return a line for everything that the configuration asks of the model and its shape does not allow."""
    source = config.model.source
    problems = []
    if config.model.max_length > shape.max_positions:
        length = config.model.max_length
        problems.append(f"model.max_length = {length}: {source} has only {shape.max_positions} positions")
    for key, parallel in (
        ("policy.tensor_parallel", config.policy.tensor_parallel),
        ("engine.tensor_parallel", config.engine.tensor_parallel),
    ):
        if shape.num_heads % parallel or max(shape.num_kv_heads, parallel) % min(shape.num_kv_heads, parallel):
            heads = f"{shape.num_heads} attention and {shape.num_kv_heads} KV heads"
            problems.append(f"{key} = {parallel} does not divide the {heads} of {source}")
    if shape.num_layers % config.policy.pipeline_parallel:
        stages = config.policy.pipeline_parallel
        problems.append(
            f"policy.pipeline_parallel = {stages} does not divide the {shape.num_layers} layers of {source}"
        )
    if not config.resources_of("train").gpus_per_rank and shape.head_dim not in CPU_HEAD_SIZES:
        allowed = ", ".join(map(str, CPU_HEAD_SIZES))
        problems.append(f"{source} has heads of {shape.head_dim} channels; on CPUs vLLM allows {allowed}")
    method = config.speculation.draft_method
    has_draft_vocabulary = method.has_weights and not method.is_policy_layer
    if has_draft_vocabulary and config.drafter.draft_vocab_size >= shape.vocab_size:
        size = config.drafter.draft_vocab_size
        problems.append(f"drafter.draft_vocab_size = {size} must be below the {shape.vocab_size} tokens of {source}")
    return problems


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan: a table of the jobs, one for each kind of memory with a column for each stage, and the notes."""
    console = console or Console()
    shape = plan.shape
    print_line(
        console,
        f"run {plan.name}: {plan.model}, {shape.parameters / 1e9:.2f} G parameters "
        f"({shape.num_layers} layers, hidden {shape.hidden_size}, vocabulary {shape.vocab_size})",
    )
    print_line(console, "\n".join(plan.algorithms) + "\n")
    columns = ("stage", ">nodes", ">ranks", ">GPUs", ">CPUs", ">host GiB", ">minutes", "partition")
    print_table(console, "Jobs", columns, [_job_row(job) for job in plan.jobs])
    for job in plan.jobs:
        if job.options:
            print_line(console, f"{job.stage}: {job.options}")
    for place in dict.fromkeys(budget.place for budget in plan.budgets):
        _render_place(console, place, [budget for budget in plan.budgets if budget.place == place])
    for note in plan.notes:
        print_line(console, f"note: {note}")


def _job_row(job: PlannedJob) -> tuple[str, ...]:
    numbers = (job.nodes, job.ranks, job.gpus, job.cpus, job.memory_gib, job.minutes)
    return (job.stage, *(f"{number:g}" for number in numbers), job.partition)


def _render_place(console: Console, place: str, budgets: list[Budget]) -> None:
    """Print items as rows and stages as columns; the last column explains an item where it is largest."""
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
