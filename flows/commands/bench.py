"""`specrl bench`: measure a finished run, its drafter, or the machine's GPU."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.benchmark import join_rows, make_cell, measure_cells, run_here
from flows.commands.options import RunsDir, option
from flows.folder import find_own_run
from slurm.backend import JobError
from specrl.bench.cells import config_of, parse_cells, speedups
from specrl.bench.job import BenchJob
from specrl.bench.options import (
    ADAPTIVE,
    GPU_SECTIONS,
    DrafterOptions,
    GpuOptions,
    RolloutOptions,
    RunOptions,
    chosen,
    numbers,
    whole_numbers,
)
from specrl.config import ConfigError, Resources
from specrl.config.methods import METHODS
from specrl.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE
from specrl.report.results import is_run
from specrl.tracking.runs import log_to_run

OF_JOBS = ("cluster.", "resources.", "stage_resources.bench.")  # keys that affect only a benchmark's jobs
SECTION_MINUTES = 20  # for a section of `bench gpu`, at most
SOURCES = ("none", "general", "task")
KS = f"1,3,5,7,{ADAPTIVE}"
VARY = """Train once with each of these values of a configuration key, in every combination with other --vary and
--cell. Values of seed are repetitions, each with its own baseline."""
CELL = """Train with these values, under this name; without values, train as the run was configured. The first cell is
the baseline for all others."""
TOGETHER = """Trainings in memory at once; by default all of a seed. With 1 they do not take turns: iterations and
drafts are compared, times are not."""
AFTER_UPDATE = """Measure how far responses follow what their seeds sampled before RL, on a page after-update.md.
--max-tokens is the length of every response, and the largest of --batches is their number."""
ROUNDS = 5

Run = Annotated[str, option("A finished run: its name, or the path of its folder.", "RUN", "--run")]
Page = Annotated[Path | None, option("The page to write, rows beside it; by default RUN/bench/NAME.md.", "FILE")]
CLUSTER = """Measure each cell beside the baseline in a job that outlives this command: on slurm, local (this machine),
or a class as module:Class. Cells that were measured with the same options and code are not measured again."""
SET = """Measure the run with another value of a setting. May be given several times. With --cluster, keys of [cluster],
[resources] and [stage_resources.bench] apply to the jobs."""
Overrides = Annotated[list[str] | None, option(SET, "KEY=VALUE", "--set")]
Repeats = Annotated[int, option("Rounds; each measures everything once.", least=1)]

group = typer.Typer(help="Measure a finished run, its drafter, or a GPU. Each writes a page of tables, and its rows.")


def describe(name: str, run: str | None, runs_dir: Path, page: Path | None, sets: Sequence[str] = ()) -> BenchJob:
    """Say what a benchmark measures and where its results go: without a run, into RUNS_DIR/bench."""
    run_dir = find_own_run(run, runs_dir) if run is not None else None
    if run_dir is None and sets:
        raise ConfigError(f"--set {sets[0]}: bench {name} measures no run whose setting this could be")
    folder = ((run_dir or runs_dir) / "bench").absolute()
    page = (page or folder / f"{name}.md").absolute()
    if is_run(page.parent):
        raise ConfigError(
            f"--page {page}: the rows lie beside the page, and could replace a file of the run; "
            f"take {page.parent / 'bench' / page.name}"
        )
    return BenchJob(name, {}, shlex.join(["specrl", *sys.argv[1:]]), folder / name, page, run_dir, tuple(sets))


def measure(job: BenchJob, options: Any, label: str = "job", minutes: int | None = None) -> None:
    """Run the benchmark here, wait at most `minutes`, and report; a JobError if it failed."""
    run_here(replace(job, options=asdict(options)), label, minutes)
    report(job)


def report(job: BenchJob) -> None:
    """Say where the page is, and upload page and rows to the measured run's MLflow run."""
    print(f"page: {job.page}")
    if job.run_dir is not None:
        files = {f"bench/{job.name}/{path.name}": path.read_text() for path in (job.page, job.json_path)}
        log_to_run(job.subject.config, {}, files)


@group.command("run")
def bench_run(
    run: Run,
    vary: Annotated[list[str] | None, option(VARY, "KEY=A,B,...")] = None,
    cell: Annotated[list[str] | None, option(CELL, "'NAME: KEY=V, ...'")] = None,
    steps: Annotated[int, option("RL steps to compare.", least=1)] = 8,
    warm_up: Annotated[int, option("Steps before those, whose times do not count.", least=0)] = 1,
    together: Annotated[int | None, option(TOGETHER, least=1)] = None,
    validate_every: Annotated[int, option("Steps between validations; 0: only one at the end.", least=0)] = 0,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
    cluster: Annotated[str | None, option(CLUSTER, "NAME")] = None,
    overrides: Overrides = None,
    at_once: Annotated[int, option("The most jobs that wait or run at once; 1 on local.", least=1)] = 8,
) -> None:
    """Train the same RL steps in several ways, and compare them.

    Whole steps and whole trainings are compared with the first cell. The trainings start from the run's policy and
    drafter before RL, and take turns, one step each. With --cluster, each cell is measured beside the baseline in its
    own job.
    """
    of_jobs = [text for text in overrides or [] if text.startswith(OF_JOBS)]
    if of_jobs and cluster is None:
        raise ConfigError(f"--set {of_jobs[0]} is for jobs: give --cluster, too")
    job = describe("run", run, runs_dir, page, [text for text in overrides or [] if text not in of_jobs])
    options = RunOptions(parse_cells(vary or [], cell or []), steps, warm_up, together, validate_every)
    if len(options.cells) < 2:
        raise ConfigError("bench run: nothing to compare; give --vary or --cell, such as --vary speculation.k=1,3,5")
    config = job.subject.config
    configs = [config_of(config, one, warm_up + steps, validate_every, given=job.changes) for one in options.cells]
    if cluster is None:
        measure(job, options)
    else:
        trainings = [one.resources_of("train") for one in configs]
        overrides = [f'stage_resources.bench.backend="{cluster}"', *of_jobs]
        measure_apart(job, options, trainings, overrides, 1 if cluster == "local" else at_once)
    if not job.changes:  # or the speedups would not be the run's
        log_to_run(config, speedups(json.loads(job.json_path.read_text()), options.cells, config), {})


def measure_apart(
    job: BenchJob, options: RunOptions, trainings: Sequence[Resources], overrides: Sequence[str], at_once: int
) -> None:
    """Measure each cell and its baseline in a separate job, and write one page; a JobError if some failed."""
    from specrl.bench.run.page import write_run_page  # imports Arrow, which other commands do not need

    folder, config = job.folder.parent / "cells", job.subject.config
    pairs = {pair[-1].label: asdict(replace(options, cells=pair)) for pair in replace(options, together=2).groups}
    jobs = {name: replace(job, options=of) for name, of in pairs.items()}
    cells = [make_cell(name, own, folder, config, trainings, overrides) for name, own in jobs.items()]
    failed = measure_cells(cells, config, at_once)
    if rows := join_rows(cells):
        write_run_page(replace(job, options=asdict(options)), rows, failed)
        report(job)
    if failed:
        reasons = "; ".join(f"{label}: {error}" for label, error in failed.items())
        raise JobError(f"{len(failed)} of {len(cells)} jobs of bench run failed: {reasons}")


@group.command("rollouts")
def bench_rollouts(
    run: Run,
    methods: Annotated[str, option("Draft methods, by commas; by default all that the run allows.", "LIST")] = "",
    ks: Annotated[str, option(f"Longest drafts in tokens; {ADAPTIVE} lets the engine choose.", "LIST")] = KS,
    batches: Annotated[str, option("Batch sizes.", "LIST")] = "1,2,4,8,16,32",
    repeats: Repeats = ROUNDS,
    max_tokens: Annotated[int, option("Longest response at a fixed batch size, in tokens.", least=1)] = 32,
    after_update: Annotated[bool, option(AFTER_UPDATE, name="--after-update")] = False,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
    overrides: Overrides = None,
) -> None:
    """Compare speculative with plain generation and stock vLLM.

    They take turns, in every round on the same requests, and are compiled if the run's engine.compile is true.
    """
    if after_update and (methods, ks, repeats) != ("", KS, ROUNDS):
        raise ConfigError("--after-update: there are no --methods, --ks and --repeats to choose; leave them out")
    job = describe("rollouts", run, runs_dir, page, overrides or ())
    if after_update and page is None:
        job = replace(job, page=job.page.with_name("after-update.md"))
    drafting = tuple(name for name, row in METHODS.items() if row.drafts)
    options = RolloutOptions(
        methods=chosen(methods, "--methods", drafting),
        ks=numbers(ks, "--ks", ADAPTIVE),
        batches=whole_numbers(batches, "--batches"),
        repeats=repeats,
        max_tokens=max_tokens,
        after_update=after_update,
    )
    options.methods_of(job.subject.config)
    measure(job, options)


@group.command("drafter")
def bench_drafter(
    run: Annotated[str | None, option("A finished run: its name, or the path of its folder.", "RUN", "--run")] = None,
    model: Annotated[Path | None, option("Hugging Face folder of the policy to draft for.", "FOLDER")] = None,
    drafter: Annotated[str, option("Folders of drafters of any kind, by commas.", "FOLDERS")] = "",
    data: Annotated[Path | None, option("File of prompts, in a format of drafter.data.", "FILE")] = None,
    prompts: Annotated[int, option("Number of prompts, from --data or to initialise each drafter.", least=1)] = 64,
    max_tokens: Annotated[int, option("Longest response in tokens, with --data.", least=1)] = 128,
    ks: Annotated[str, option("Lengths of drafts in tokens, with --data.", "LIST")] = "3",
    temperatures: Annotated[str, option("Temperatures, with --data; 0 is greedy.", "LIST")] = "0,1",
    batches: Annotated[str, option("Batch sizes, with --data.", "LIST")] = "1,4",
    sources: Annotated[str, option("Initialisations, with --run: none, general, task.", "LIST")] = ",".join(SOURCES),
    steps: Annotated[int, option("RL steps, with --run.", least=1)] = 10,
    repeats: Repeats = 3,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
    overrides: Overrides = None,
) -> None:
    """Measure drafters on prompts, or over a run's RL steps.

    With --model, --drafter and --data it measures acceptance by position, temperature and k, and the speedup over
    plain decoding, in comparison with n-gram lookup. With --run it compares EAGLE-3 drafters over the same RL steps,
    initialised on the task, on general instructions or not at all, each frozen and trained online.
    """
    job = describe("drafter", run, runs_dir, page, overrides or ())
    options = DrafterOptions(
        model=model,
        drafters=tuple(Path(folder) for folder in drafter.split(",") if folder),
        data=data,
        prompts=prompts,
        max_tokens=max_tokens,
        ks=whole_numbers(ks, "--ks"),
        temperatures=chosen_temperatures(temperatures),
        sources=chosen(sources, "--sources", SOURCES),
        steps=steps,
        batches=whole_numbers(batches, "--batches"),
        repeats=repeats,
    )
    options.check(job.subject.config if run else None)
    measure(job, options)


def chosen_temperatures(text: str) -> tuple[float, ...]:
    """Split a comma-separated list of temperatures."""
    found = tuple(float(part) if part.replace(".", "", 1).isdigit() else -1.0 for part in text.split(","))
    if not all(value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE for value in found):
        allowed = f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        raise ConfigError(f"--temperatures {text}: allowed: {allowed}, separated by commas")
    return found


@group.command("gpu")
def bench_gpu(
    sections: Annotated[str, option(f"Of {', '.join(GPU_SECTIONS)}; all by default.", "LIST")] = "",
    short: Annotated[bool, option("Small models, within ten minutes on a GPU.", name="--short")] = False,
    page: Page = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Measure kernels, engine, trainer and whole RL steps on GPUs.

    It needs neither a network nor a run, because all models are random. Every row is saved at once, a section that
    fails loses no other, and the same command resumes where an earlier one ended. Without a GPU everything runs at
    small size.
    """
    job = describe("gpu", None, runs_dir, page)
    failed = []
    for section in chosen(sections, "--sections", GPU_SECTIONS) or GPU_SECTIONS:
        try:
            measure(job, GpuOptions(section, short), section, SECTION_MINUTES)
        except JobError as error:
            failed.append(f"{section}: {error}")
    if failed:
        raise JobError("; ".join(failed))
