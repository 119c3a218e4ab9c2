"""The plan of a run before anything is submitted: its jobs, the memory of each rank, and what travels and is stored.

`plan` reads only the configuration and the `config.json` of a local model; it needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from specrl.config import STAGES, Config, ConfigError, StageName
from specrl.models.drafters import with_source_heads, with_source_sizes
from specrl.models.shapes import ModelShape, model_shape
from specrl.projection.advice import Fit, what_fits
from specrl.projection.budgets import Budget, check_kv, overflow, stage_budgets
from specrl.projection.disk import CheckpointPlan, checkpoint_plan
from specrl.projection.memory import GIB, Rank
from specrl.projection.speeds import Speeds
from specrl.projection.traffic import Transfer, step_traffic
from specrl.report.tables import print_line, print_table

FP8_BLOCK = 128
"""The rows and columns of a block of FP8 weights with one scale."""
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
    memory_gib: float | None
    """The host memory, in GiB; None where the job does not ask for any."""
    minutes: int
    """The wall-clock limit, in minutes."""
    partition: str
    """Where the job waits, in the scheduler's words."""
    options: str
    """The options with which the job is submitted, in the scheduler's words; empty without any."""


@dataclass(frozen=True)
class Plan:
    """The jobs of a run, the memory of their ranks, and what a step of training sends and stores."""

    name: str
    """The run's name."""
    model: str
    """The model's source."""
    shape: ModelShape
    jobs: tuple[PlannedJob, ...]
    budgets: tuple[Budget, ...]
    traffic: tuple[Transfer, ...]
    """What one rank of the train stage receives in a step."""
    checkpoint: CheckpointPlan
    speeds: Speeds
    """What is assumed to turn bytes into seconds."""
    algorithms: tuple[str, ...]
    """What becomes of long prompts, the reward and each chosen algorithm, with its options."""
    notes: tuple[str, ...]
    """Lines about what will run, but perhaps more slowly than intended."""


def plan(
    config: Config, queues: Mapping[StageName, str] | None = None, options: Mapping[StageName, str] | None = None
) -> Plan:
    """Return the plan of a run.

    Args:
        queues: Where the job of each stage waits, in the scheduler's words; the partitions by default.
        options: The options with which the job of each stage is submitted, in the scheduler's words.

    Raises:
        ConfigError: The model's shape is unknown or does not fit the configuration, or a rank needs more than it has;
            the message then ends with changes that would fit, if some are found.
    """
    config = with_source_sizes(config)
    shape = model_shape(config.model)
    found = _Findings.of(config, shape)
    if found.misfits:
        advice = what_fits(config, found.fit, lambda changed: _Findings.of(changed, shape).fit)
        raise ConfigError("\n".join([*found.misfits, *([advice] if advice else [])]))
    jobs = tuple(_job(config, stage, (queues or {}).get(stage), (options or {}).get(stage, "")) for stage in STAGES)
    trainer = rank_of(config, "train", shape)
    speeds = Speeds.of(config, trainer.gpu)
    return Plan(
        name=config.name,
        model=config.model.source,
        shape=shape,
        jobs=jobs,
        budgets=tuple(found.budgets),
        traffic=tuple(step_traffic(trainer, speeds)),
        checkpoint=checkpoint_plan(trainer, speeds),
        speeds=speeds,
        algorithms=_algorithms(config),
        notes=tuple(found.notes),
    )


@dataclass(frozen=True)
class _Findings:
    """What was found about the memory and the layout of a configuration."""

    budgets: list[Budget]
    problems: list[str]
    """What memory cannot mend: sizes that do not divide the model."""
    too_little: list[str]
    """A line for each kind of memory that is too small."""
    notes: list[str]

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> _Findings:
        """Look at the layout and, if it suits the model, at the memory of each stage."""
        problems = _shape_problems(config, shape)
        budgets: list[Budget] = []
        too_little: list[str] = []
        notes: list[str] = []
        for stage in STAGES if not problems else ():
            rank = rank_of(config, stage, shape)
            budgets += stage_budgets(stage, rank)
            kv_problems, kv_notes = check_kv(stage, rank)
            too_little += kv_problems
            notes += kv_notes
        too_little += [overflow(budget) for budget in budgets if budget.needed_gib > budget.available_gib]
        return cls(budgets, problems, too_little, notes)

    @property
    def misfits(self) -> list[str]:
        """All lines that keep the run from being submitted."""
        return self.problems + self.too_little

    @property
    def fit(self) -> Fit:
        """How far the configuration is from fitting."""
        lacking = tuple(budget for budget in self.budgets if budget.needed_gib > budget.available_gib)
        return Fit(lacking, len(self.too_little) - len(lacking), bool(self.problems))


def _algorithms(config: Config) -> tuple[str, ...]:
    """Return a line for long prompts, for the reward and for each chosen algorithm with its options."""
    chosen = [f"{registry.key} = {algorithm}" for registry, algorithm in config.algorithms]
    overlong = f"data.overlong = {config.data.overlong}, for prompts of more than {config.max_prompt_tokens} tokens"
    return (overlong, f"data.reward = {config.data.reward}", *chosen)


def _job(config: Config, stage: StageName, queue: str | None, options: str) -> PlannedJob:
    asked, cluster = config.resources_of(stage), config.cluster_of(stage)
    return PlannedJob(
        stage=stage,
        nodes=asked.nodes,
        ranks=asked.ranks,
        gpus=asked.ranks * asked.gpus_per_rank,
        cpus=asked.ranks * asked.cpus_per_rank,
        memory_gib=asked.ranks * asked.memory_gib_per_rank if cluster.request_memory else None,
        minutes=asked.minutes,
        partition=queue or cluster.partition or "default",
        options=options,
    )


def rank_of(config: Config, stage: StageName, shape: ModelShape) -> Rank:
    """Return one rank of a stage, with its layout."""
    asked = config.resources_of(stage)
    shards = config.policy.tensor_parallel * config.policy.pipeline_parallel
    return Rank(shape, config, asked.gpus_per_rank, max(asked.ranks // shards, 1))


def device_bytes(config: Config, stage: StageName) -> int:
    """Count the memory that a rank needs on its GPU apart from the engine's share, which is a part of the GPU's own.

    It is 0 without a GPU, and where the model's shape is not known.
    """
    try:
        shape = model_shape(config.model)
    except ConfigError:
        return 0
    budgets = stage_budgets(stage, rank_of(config, stage, shape))
    return sum(round(budget.needed_gib * GIB) for budget in budgets if budget.place == "GPU, trainer")


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
        problems += _head_problems(key, parallel, shape, source)
    problems += _expert_problems(config, shape)
    if shape.num_layers % config.policy.pipeline_parallel:
        stages = config.policy.pipeline_parallel
        problems.append(
            f"policy.pipeline_parallel = {stages} does not divide the {shape.num_layers} layers of {source}"
        )
    problems += _head_size_problems(config, shape, source)
    method = config.speculation.draft_method
    if method.has_weights and not method.is_policy_layer:
        problems += _drafter_problems(config, shape)
    return problems


def _drafter_problems(config: Config, shape: ModelShape) -> list[str]:
    """Return a line for each setting of an EAGLE-3 drafter that the policy does not have as much for."""
    drafter, source, problems = config.drafter, config.model.source, []
    if drafter.draft_vocab_size > shape.vocab_size:
        size = drafter.draft_vocab_size
        problems.append(f"drafter.draft_vocab_size = {size} must be at most the {shape.vocab_size} tokens of {source}")
    if drafter.feature_layers and drafter.feature_layers[-1] > shape.num_layers:
        chosen = list(drafter.feature_layers)
        problems.append(f"drafter.feature_layers = {chosen} must be at most the {shape.num_layers} layers of {source}")
    if drafter.num_layers > shape.num_layers:
        own = f"drafter.num_layers = {drafter.num_layers}"
        problems.append(f"{own} must be at most the {shape.num_layers} layers of {source}")
    own_shape = with_source_heads(config, shape)
    if own_shape != shape:
        of = f"drafter.source = {drafter.source}"
        problems += _head_problems("engine.tensor_parallel", config.engine.tensor_parallel, own_shape, of)
        problems += _head_size_problems(config, own_shape, of)
    return problems


def _head_problems(key: str, parallel: int, shape: ModelShape, source: str) -> list[str]:
    """Return a line if a tensor parallel size does not divide the attention heads of a model."""
    if shape.heads_divide(parallel):
        return []
    heads = f"{shape.num_heads} attention and {shape.num_kv_heads} KV heads"
    return [f"{key} = {parallel} does not divide the {heads} of {source}"]


def _head_size_problems(config: Config, shape: ModelShape, source: str) -> list[str]:
    """Return a line if vLLM has no kernels for the heads of a model on the run's machines."""
    if config.resources_of("train").gpus_per_rank or shape.head_dim in CPU_HEAD_SIZES:
        return []
    allowed = ", ".join(map(str, CPU_HEAD_SIZES))
    return [f"{source} has heads of {shape.head_dim} channels; on CPUs vLLM allows {allowed}"]


def _expert_problems(config: Config, shape: ModelShape) -> list[str]:
    """Return a line if expert parallelism does not suit the model, or an engine would cut through an FP8 block."""
    size, engine, source = config.policy.expert_parallel, config.engine.tensor_parallel, config.model.source
    problems = []
    if not shape.num_experts and size > 1:
        problems.append(f"policy.expert_parallel = {size}: {source} has no experts; it must be 1")
    if shape.num_experts % size:
        experts = f"the {shape.num_experts} experts"
        problems.append(f"policy.expert_parallel = {size} does not divide {experts} of {source}")
    if config.precision.generation == "fp8" and shape.num_experts and shape.expert_size // engine % FP8_BLOCK:
        rows = f"the {shape.expert_size} rows of an expert of {source} in {engine} parts"
        problems.append(f"engine.tensor_parallel = {engine}: {rows} cut through FP8 blocks of {FP8_BLOCK}")
    return problems


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan: tables of the jobs, of each kind of memory by stage, and of a step's transfers; then the notes."""
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
        _render_place(console, place, [budget for budget in plan.budgets if budget.place == place])
    _render_traffic(console, plan)
    print_line(console, _checkpoint_line(plan.checkpoint))
    print_line(console, "assumed: " + "; ".join(plan.speeds.lines))
    for note in plan.notes:
        print_line(console, f"note: {note}")


def _job_row(job: PlannedJob) -> tuple[str, ...]:
    numbers = (job.nodes, job.ranks, job.gpus, job.cpus, job.memory_gib, job.minutes)
    return (job.stage, *("not asked for" if number is None else f"{number:g}" for number in numbers), job.partition)


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


def _render_traffic(console: Console, plan: Plan) -> None:
    """Print what a rank receives in a step, with the seconds that it takes at the assumed speeds."""
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


def _checkpoint_line(checkpoint: CheckpointPlan) -> str:
    return (
        f"checkpoint: {checkpoint.gib:.1f} GiB; a step waits {checkpoint.copy_s:.1f} s for its copy, and it is written "
        f"in {checkpoint.write_s:.0f} s beside the next; at most {checkpoint.number} at a time"
    )
