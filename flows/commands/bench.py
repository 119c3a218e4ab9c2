"""`specrl bench`: measure a finished run, its drafter, or the machine's GPU."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.bench_jobs import check, copy_results, join_rows, measure_cells
from flows.commands.options import RunsDir
from flows.folder import find_own_run
from slurm.bench import bench_environment, run_bench
from specrl.bench.cells import config_of, parse_cells, speedups
from specrl.bench.job import BenchJob
from specrl.bench.options import ADAPTIVE, TAIL, DrafterOptions, GpuOptions, RolloutOptions, RunOptions, chosen, numbers
from specrl.bench.subject import find_subject
from specrl.config import Config, ConfigError, Resources, parse_config
from specrl.config.methods import METHODS
from specrl.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE
from specrl.report.results import CONFIG_FILE
from specrl.tracking import log_files, log_speedups
from tasks.cells import CellJob, Size, make_cell

OF_JOBS = ("cluster.", "resources.", "stage_resources.bench.")
"""The beginnings of the keys with which `--set` changes a benchmark's jobs, and not what it measures."""
SOURCES = ("none", "general", "task")
KS, BATCHES = f"1,3,5,7,{ADAPTIVE}", f"1,2,4,8,16,32,{TAIL}"
VARY = """Train once with each of these values of a key of the configuration, in every combination with other --vary and
--cell. Values of seed are repetitions, each with a baseline of its own."""
CELL = """Train with these values, under a name; without any, as the run was configured. The first cell is the baseline
that all others are compared with."""
SECTIONS = ("sampler", "exactness", "fp8", "generation", "training", "sleep")


def option(help_text: str, metavar: str | None = None, name: str | None = None, least: int | None = None) -> Any:
    """Describe an option; `name` only where it is not that of the parameter."""
    return typer.Option(*([name] if name else []), metavar=metavar, help=help_text, min=least)


Run = Annotated[str, option("A finished run: its name, or the path of its folder.", "RUN", "--run")]
Json = Annotated[Path | None, option("The file of the rows; by default beside the page.", "FILE", "--json")]
Page = Annotated[Path | None, option("The page; RUN/bench/NAME.md by default.", "FILE")]
CLUSTER = """Run as jobs that outlive this command: on slurm, on local (this machine), or on a class as module:Class.
What has been measured with the same options and code is taken as it is."""
SET = """Measure the run with another value of a setting; or, with --cluster, override one of the jobs: a key of
[cluster], [resources] or [stage_resources.bench]. May be given several times."""
Cluster = Annotated[str | None, option(CLUSTER, "NAME")]
Overrides = Annotated[list[str] | None, option(SET, "KEY=VALUE", "--set")]
Threads = Annotated[int | None, option("CPU threads; by default those of a rank of validate.", least=1)]
Repeats = Annotated[int, option("Rounds; each measures everything once.", least=1)]

group = typer.Typer(help="Measure a finished run, its drafter, or a GPU. Each writes a page with tables, and rows.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="bench")


@dataclass(frozen=True)
class Request:
    """What all benchmarks are told."""

    name: str
    run: str | None
    runs_dir: Path
    json_path: Path | None
    page: Path | None
    cluster: str | None
    overrides: list[str] | None
    threads: int | None = None

    @property
    def of_jobs(self) -> list[str]:
        """The overrides of the jobs."""
        return [text for text in self.overrides or [] if text.startswith(OF_JOBS)]

    @property
    def changes(self) -> tuple[str, ...]:
        """The settings of the run that are measured with another value."""
        return tuple(text for text in self.overrides or [] if not text.startswith(OF_JOBS))

    def subject(self) -> tuple[Path | None, Config]:
        """Find the folder and the configuration of the run; without one, no folder and that of RUNS_DIR/bench-NAME."""
        if self.of_jobs and self.cluster is None:
            raise ConfigError(f"--set {self.of_jobs[0]} is for jobs: give --cluster, too")
        if self.run is not None:
            run_dir = find_own_run(self.run, self.runs_dir)
            return run_dir, find_subject(run_dir, self.changes).config
        if self.changes:
            raise ConfigError(f"--set {self.changes[0]}: bench {self.name} measures no run whose setting this could be")
        values = {"name": f"bench-{self.name}", "runs_dir": str(self.runs_dir.absolute()), "model": {"source": "tiny"}}
        config = parse_config({**values, "resources": {"gpus_per_rank": 1}})
        if (config.run_dir / CONFIG_FILE).exists():
            raise ConfigError(
                f"{config.run_dir} is the folder of a run; choose another --runs-dir for bench {self.name}"
            )
        return None, config

    def job(self, options: Any, run_dir: Path | None, config: Config) -> BenchJob:
        """Describe the work of the benchmark's process."""
        folder = (run_dir or config.run_dir) / "bench"
        page = (self.page or folder / f"{self.name}.md").absolute()
        return BenchJob(
            name=self.name,
            options=asdict(options),
            command=shlex.join(["specrl", *sys.argv[1:]]),
            folder=folder / self.name,
            page=page,
            json_path=(self.json_path or page.with_suffix(".json")).absolute(),
            run_dir=run_dir,
            changes=self.changes,
            threads=self.threads,
        )


def measure(request: Request, options: Any, size: Size, run_dir: Path | None, config: Config) -> BenchJob:
    """Run a benchmark here and wait for it, or as one job.

    Raises:
        JobError: It failed.
    """
    job = request.job(options, run_dir, config)
    if request.cluster is not None:
        (cell,) = cells = as_jobs(request, [(job.name, job)], size, config)
        check(measure_cells(cells, config, 1), job.name, 1)
        copy_results(cell, job)
    else:
        resources = config.resources_of("validate") if run_dir is not None else None if size.gpus else Resources()
        job.folder.mkdir(parents=True, exist_ok=True)
        run_bench(job, job.folder / "job.json", bench_environment(resources, request.threads))
    report(job, config)
    return job


def as_jobs(request: Request, jobs: list[tuple[str, BenchJob]], size: Size, config: Config) -> list[CellJob]:
    """Make labelled benchmarks jobs of the chosen cluster."""
    overrides = [f'stage_resources.bench.backend="{request.cluster}"', *request.of_jobs]
    return [make_cell(label, job, job.folder.with_name("cells"), config, size, overrides) for label, job in jobs]


def report(job: BenchJob, config: Config) -> None:
    """Say where the page is, and upload page and rows to the MLflow run of the run that was measured."""
    print(f"page: {job.page}")
    if job.run_dir is not None:
        log_files(config, {f"bench/{job.name}": [job.page, job.json_path]})


@group.command("run")
def bench_run(
    run: Run,
    vary: Annotated[list[str] | None, option(VARY, "KEY=A,B,...")] = None,
    cell: Annotated[list[str] | None, option(CELL, "'NAME: KEY=V, ...'")] = None,
    steps: Annotated[int, option("RL steps that are compared.", least=1)] = 8,
    warm_up: Annotated[int, option("Steps before them, whose times do not count.", least=0)] = 1,
    together: Annotated[int | None, option("Trainings in memory at once; by default all of a seed.", least=2)] = None,
    validate_every: Annotated[int, option("Steps between validations; 0 for one at the end.", least=0)] = 0,
    json_path: Json = None,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
    cluster: Cluster = None,
    overrides: Overrides = None,
    at_once: Annotated[int, option("Jobs that wait or run at once; 1 on local.", least=1)] = 8,
) -> None:
    """Train the same RL steps in several ways, and compare whole steps and whole trainings with the first way.

    The trainings begin with the run's policy and drafter before RL, and take a step each in turn. With --cluster, each
    is measured beside the baseline in a job of its own.
    """
    request = Request("run", run, runs_dir, json_path, page, cluster, overrides)
    run_dir, config = request.subject()
    options = RunOptions(parse_cells(vary or [], cell or []), steps, warm_up, together, validate_every)
    if len(options.cells) < 2:
        raise ConfigError("bench run: nothing to compare; give --vary or --cell, such as --vary speculation.k=1,3,5")
    resources = [
        config_of(config, one, options.warm_up + options.steps, validate_every).resources_of("train")
        for one in options.cells
    ]
    ranks, sharers = max(one.ranks for one in resources), 2 if cluster else max(map(len, options.groups))
    cores = max(one.ranks * one.cpus_per_rank for one in resources)
    size = Size(cores, ranks * sharers, ranks * max(one.gpus_per_rank for one in resources))
    if cluster is None:
        job = measure(request, options, size, run_dir, config)
    else:
        job = measure_apart(request, options, size, at_once)
    if not request.changes:  # or else the speedups are not those of the run
        log_speedups(config, speedups(json.loads(job.json_path.read_text()), options.cells, config))


def measure_apart(request: Request, options: RunOptions, size: Size, at_once: int) -> BenchJob:
    """Measure each cell beside its baseline in a job of its own, and write one page of all.

    Raises:
        JobError: Some failed; the page has the others.
    """
    from specrl.bench.pages import write_rows  # import Arrow, which the command line does without
    from specrl.bench.run.page import write_run_page

    run_dir, config = request.subject()
    job = request.job(options, run_dir, config)
    pairs = [replace(options, cells=pair) for pair in replace(options, together=2).groups]
    labelled = [(pair.cells[-1].label, request.job(pair, run_dir, config)) for pair in pairs]
    cells = as_jobs(request, labelled, size, config)
    failed = measure_cells(cells, config, 1 if request.cluster == "local" else at_once)
    if rows := join_rows(cells):
        write_rows(job.json_path, rows)
        write_run_page(job, rows, failed)
        report(job, config)
    check(failed, "run", len(cells))
    return job


@group.command("rollouts")
def bench_rollouts(
    run: Run,
    methods: Annotated[str, option("Draft methods, with commas; by default all that the run allows.", "LIST")] = "",
    ks: Annotated[str, option(f"Longest drafts in tokens; {ADAPTIVE} lets the engine choose.", "LIST")] = KS,
    batches: Annotated[str, option(f"Batch sizes; {TAIL} is 64 requests of natural length.", "LIST")] = BATCHES,
    repeats: Repeats = 5,
    max_tokens: Annotated[int, option("Longest response at a fixed batch size, in tokens.", least=1)] = 32,
    json_path: Json = None,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
    cluster: Cluster = None,
    overrides: Overrides = None,
    threads: Threads = None,
) -> None:
    """Compare speculative generation with plain generation of the same tokens, and with stock vLLM.

    All of them run in turn, in every round on the same requests, compiled if the run's engine.compile says so.
    """
    request = Request("rollouts", run, runs_dir, json_path, page, cluster, overrides, threads)
    run_dir, config = request.subject()
    drafting = tuple(name for name, row in METHODS.items() if row.drafts)
    options = RolloutOptions(
        methods=chosen(methods, "--methods", drafting),
        ks=numbers(ks, "--ks", ADAPTIVE),
        batches=numbers(batches, "--batches", TAIL),
        repeats=repeats,
        max_tokens=max_tokens,
    )
    options.methods_of(config)
    measure(request, options, size_of(config, threads), run_dir, config)


def size_of(config: Config, threads: int | None) -> Size:
    """Return what a benchmark with a single process asks for."""
    rank = config.resources_of("validate")
    return Size(threads or rank.cpus_per_rank, 1, int(rank.gpus_per_rank > 0))


@group.command("drafter")
def bench_drafter(
    run: Annotated[str | None, option("A finished run: its name, or the path of its folder.", "RUN", "--run")] = None,
    model: Annotated[Path | None, option("Hugging Face folder of the policy that is drafted for.")] = None,
    drafter: Annotated[str, option("Folders of drafters of any kind, with commas.", "FOLDERS")] = "",
    data: Annotated[Path | None, option("JSONL file of prompts: text, turns or messages; perhaps a category.")] = None,
    template: Annotated[str | None, option("Format string with {prompt}, or chat, which is the default.")] = None,
    prompts: Annotated[int, option("Prompts: of the file, or for the initialisation of each drafter.", least=1)] = 64,
    max_tokens: Annotated[int, option("Longest response in tokens, with --data.", least=1)] = 128,
    ks: Annotated[str, option("Lengths of drafts in tokens, with --data.", "LIST")] = "3",
    temperatures: Annotated[str, option("Temperatures, with --data; 0 is greedy.", "LIST")] = "0,1",
    batches: Annotated[str, option("Batch sizes, with --data.", "LIST")] = "1,4",
    sources: Annotated[str, option("Initialisations, with --run: none, general, task.", "LIST")] = ",".join(SOURCES),
    steps: Annotated[int, option("RL steps, with --run.", least=1)] = 10,
    repeats: Repeats = 3,
    json_path: Json = None,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
    cluster: Cluster = None,
    overrides: Overrides = None,
    threads: Threads = None,
) -> None:
    """Measure drafters: any of them on a file of prompts, or those of a run over its RL steps.

    With --model, --drafter and --data it measures acceptance by position, category, temperature and k, and the speedup
    over plain decoding and n-gram lookup. With --run it compares EAGLE-3 drafters over the same RL steps, initialised
    on the task, on general instructions and not at all, each frozen and trained online.
    """
    request = Request("drafter", run, runs_dir, json_path, page, cluster, overrides, threads)
    run_dir, config = request.subject()
    options = DrafterOptions(
        model=model,
        drafters=tuple(Path(folder) for folder in drafter.split(",") if folder),
        data=data,
        template=template,
        prompts=prompts,
        max_tokens=max_tokens,
        ks=whole_numbers(ks, "--ks"),
        temperatures=tuple(map(float, chosen_temperatures(temperatures))),
        sources=chosen(sources, "--sources", SOURCES),
        steps=steps,
        batches=whole_numbers(batches, "--batches"),
        repeats=repeats,
    )
    options.check(config if run else None)
    rank, size = config.resources_of("train"), size_of(config, threads)
    if run:  # plain decoding and a drafter, frozen and online, at once
        size = Size(rank.ranks * rank.cpus_per_rank, 3 * rank.ranks, rank.ranks * rank.gpus_per_rank)
    measure(request, options, size, run_dir, config)


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Split a list with commas of positive numbers."""
    return tuple(int(number) for number in numbers(text, option))


def chosen_temperatures(text: str) -> list[str]:
    """Split a list with commas of temperatures."""
    parts = text.split(",")
    for part in parts:
        value = float(part) if part.replace(".", "", 1).isdigit() else -1.0
        if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
            allowed = f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise ConfigError(f"--temperatures {part}: allowed: {allowed}, separated by commas")
    return parts


@group.command("gpu")
def bench_gpu(
    sections: Annotated[str, option(f"Of {', '.join(SECTIONS)}; all by default.", "LIST")] = "",
    short: Annotated[bool, typer.Option("--short", help="Small models, within ten minutes on a GPU.")] = False,
    json_path: Json = None,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
    cluster: Cluster = None,
    overrides: Overrides = None,
    threads: Threads = None,
) -> None:
    """Measure everything that a first GPU is asked, without a network and without a run; all models are random.

    Every row is saved as soon as it is there, a section that fails loses no other, and the same command goes on where
    an earlier one has ended. Without a GPU everything runs at small size, and what needs a GPU says so.
    """
    request = Request("gpu", None, runs_dir, json_path, page, cluster, overrides, threads)
    run_dir, config = request.subject()
    options = GpuOptions(chosen(sections, "--sections", SECTIONS), short)
    measure(request, options, Size(threads or config.resources_of("validate").cpus_per_rank, 1, 1), run_dir, config)
