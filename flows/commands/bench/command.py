"""`specrl bench`: measure a finished run's policy and drafter, or the machine's GPU.

Every benchmark is one row of `BENCHMARKS`: its sub-command has an option for each field of its settings, beside those
that all benchmarks share.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flows.commands.bench.jobs import BenchRequest, clear, submit
from flows.commands.options import RunsDir
from flows.folder import find_own_run
from slurm.bench import bench_environment, run_bench
from specrl.bench.job import BenchJob
from specrl.bench.pages import default_page
from specrl.bench.run.settings import RunSettings, SweepSettings
from specrl.bench.settings import (
    AgreementSettings,
    BenchSettings,
    BubbleSettings,
    CheckpointSettings,
    ControlBenchSettings,
    DrafterSettings,
    ExchangeSettings,
    FaultSettings,
    GpuSettings,
    GrowthSettings,
    LossSettings,
    PlanSettings,
    PrecisionSettings,
    ProjectionSettings,
    RolloutSettings,
    StepSettings,
)
from specrl.bench.subject import check_taken, find_subject
from specrl.config import Config, ConfigError, Resources, parse_config
from specrl.config.errors import explain
from specrl.report.results import CONFIG_FILE
from specrl.tracking import log_files, log_speedups
from tasks.cells import PLACES

BENCHMARKS: Mapping[str, type[BenchSettings]] = {
    "run": RunSettings,
    "sweep": SweepSettings,
    "rollouts": RolloutSettings,
    "step": StepSettings,
    "growth": GrowthSettings,
    "drafter": DrafterSettings,
    "losses": LossSettings,
    "bubbles": BubbleSettings,
    "agreement": AgreementSettings,
    "precision": PrecisionSettings,
    "control": ControlBenchSettings,
    "checkpoints": CheckpointSettings,
    "faults": FaultSettings,
    "exchange": ExchangeSettings,
    "plan": PlanSettings,
    "projection": ProjectionSettings,
    "gpu": GpuSettings,
}
"""The settings of each benchmark; its code is `specrl.bench.NAME.main`, but that of a sweep is that of its cells."""
THREADS = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER",
        min=1,
        help="The number of CPU threads; by default cpus_per_rank of the run's validate stage, or without a run all.",
    ),
]
SHARED = {
    "run": Annotated[
        str, typer.Option("--run", metavar="RUN", help="The name of a finished run, or the path of its folder.")
    ],
    "json_path": Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the rows to this JSON file.")
    ],
    "page": Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="The Markdown page to write; benchmarks/DATE-NAME.md by default."),
    ],
    "runs_dir": RunsDir,
    "cluster": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run it as a job that outlives this command: on slurm, from a login node, on local (this machine), or "
            "on a class as module:Class. What has been measured with the same settings and code is taken as it is.",
        ),
    ],
    "overrides": Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Measure the run with another value of a setting that a run may change while it goes on, such as "
            "engine.kv_cache_gib=0.25; or, with --cluster, override a setting of the jobs: a key of [cluster], "
            "[resources] or [stage_resources.bench]. May be given several times.",
        ),
    ],
    "at_once": Annotated[
        int | None,
        typer.Option(
            "--at-once",
            metavar="NUMBER",
            min=1,
            help="The largest number of jobs that wait or run at the same time; by default 8, and on local 1.",
        ),
    ],
}
OPTIONAL_RUN = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The name of a finished run, or the path of its folder.")
]
DEFAULTS = {"run": Parameter.empty, "runs_dir": Path("runs")}
JOBS_AT_ONCE = 8
"""How many jobs wait or run at the same time by default, where each has cores of its own."""

group = typer.Typer(
    help="Measure a finished run's policy and drafter, or a GPU.\n\n"
    "Each benchmark writes a dated page with tables and charts."
)


def register(app: typer.Typer) -> None:
    for name, kind in BENCHMARKS.items():
        group.command(name)(make_command(name, kind))
    app.add_typer(group, name="bench")


def make_command(name: str, kind: type[BenchSettings]) -> Callable[..., None]:
    """Return the function behind `specrl bench NAME`, with a signature from which Typer makes its options."""

    known = {key: option for key, option in SHARED.items() if kind.needs_run or key != "run"}
    defaults = dict(DEFAULTS)
    if kind.run_is_optional:
        known["run"], defaults["run"] = OPTIONAL_RUN, None

    def measure(**given: Any) -> None:
        shared = {key: given.pop(key) for key in known}
        threads = 1 if "threads" in kind.model_fields else given.pop("threads")
        settings = parse_settings(kind, given)
        cluster, overrides, at_once = (shared.pop(key) for key in ("cluster", "overrides", "at_once"))
        of_jobs = [override for override in overrides or [] if override.startswith(PLACES)]
        shared["changes"] = tuple(override for override in overrides or [] if not override.startswith(PLACES))
        if cluster is None and not kind.always_jobs:
            if of_jobs or at_once:
                given_jobs = f"--set {of_jobs[0]}" if of_jobs else "--at-once"
                raise ConfigError(f"{given_jobs} is for jobs: give --cluster, too")
            run_here(name, settings=settings, threads=threads, **shared)
        else:
            jobs = {"cluster": cluster or "local", "overrides": of_jobs, "at_once": at_once}
            run_as_jobs(name, settings=settings, threads=threads, **shared, **jobs)

    options = {key: _option(key, field) for key, field in kind.model_fields.items()}
    annotations: dict[str, Any] = {**known, "threads": THREADS, **options}
    measure.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(key, Parameter.KEYWORD_ONLY, default=defaults.get(key), annotation=annotation)
            for key, annotation in annotations.items()
        ]
    )
    measure.__doc__ = kind.__doc__
    return measure


def run_here(
    name: str,
    runs_dir: Path,
    settings: BenchSettings,
    json_path: Path | None,
    page: Path | None,
    threads: int | None,
    changes: tuple[str, ...],
    run: str | None = None,
) -> None:
    """Run `specrl.bench.NAME.main:main` in a process of its own, with a rank's environment, and wait for it.

    Args:
        changes: The settings of the run that are measured with another value, `KEY=VALUE` each.
        run: The finished run; None for a benchmark without one, which works in the folder RUNS_DIR/bench-NAME.

    Raises:
        ConfigError: The run does not exist or has not finished training, or the settings do not fit it.
        JobError: The benchmark failed.
    """
    run_dir, config = subject_of(name, run, runs_dir, settings, changes)
    folder = config.run_dir if run_dir is None else run_dir
    if run_dir is None and not settings.goes_on:
        clear(folder)
    job = BenchJob(
        entry=f"specrl.bench.{name}.main:main",
        run_dir=folder,
        settings=settings.model_dump(mode="json"),
        command=_command_line(name, run, settings, changes),
        page=(page or default_page(name)).absolute(),
        json_path=_rows_path(name, json_path, run_dir, folder),
        changes=changes,
    )
    alone = None if settings.uses_gpus else Resources()
    resources = alone if run_dir is None else config.resources_of("validate")
    run_bench(job, folder / "bench" / f"{name}.json", bench_environment(resources, threads))
    print(f"page: {job.page}")
    if run_dir is not None:
        pictures = sorted(job.page.parent.glob(f"{job.page.stem}-*.svg"))
        log_files(config, {f"bench/{name}": [job.page, *pictures, job.json_path]})
        if not changes:  # or else they are not those of the run
            log_speedups(config, settings.headline(json.loads(job.json_path.read_text()), config))


def run_as_jobs(
    name: str,
    runs_dir: Path,
    settings: BenchSettings,
    json_path: Path | None,
    page: Path | None,
    threads: int | None,
    cluster: str,
    overrides: list[str],
    at_once: int | None,
    changes: tuple[str, ...],
    run: str | None = None,
) -> None:
    """Run a benchmark as a job, or each cell of a sweep as one.

    Args:
        cluster: The scheduler of the jobs.
        overrides: `KEY=VALUE` each, of the cluster and the resources.
        changes: As for `run_here`.

    Raises:
        ConfigError: As `run_here`, or the jobs cannot be submitted from here.
        JobError: A job failed.
    """
    run_dir, config = subject_of(name, run, runs_dir, settings, changes)
    request = BenchRequest(
        name=name,
        settings=settings,
        command=_command_line(name, run, settings, changes),
        page=(page or default_page(name)).absolute(),
        json_path=_rows_path(name, json_path, run_dir, config.run_dir),
        threads=threads,
        overrides=[f'stage_resources.bench.backend="{cluster}"', *overrides],
        at_once=at_once or (1 if cluster == "local" else JOBS_AT_ONCE),
        changes=changes,
    )
    submit(request, run_dir, config)


def subject_of(
    name: str, run: str | None, runs_dir: Path, settings: BenchSettings, changes: tuple[str, ...]
) -> tuple[Path | None, Config]:
    """Return the folder and the configuration, with the changes, of the finished run that is measured.

    Without a run, the folder is None, and the configuration is that of the benchmark's jobs, in RUNS_DIR/bench-NAME.

    Raises:
        ConfigError: The run does not exist or has not finished training, the settings or the changes do not fit it, or
            the folder of a benchmark without a run is that of a run.
    """
    if run is not None:
        run_dir = find_own_run(run, runs_dir)
        config = find_subject(run_dir, changes).config
        settings.check(config)  # a mistake shows before anything starts
        check_taken(config, changes, settings.trainings(config) if changes else [])
        return run_dir, config
    if changes:
        raise ConfigError(f"--set {changes[0]}: bench {name} measures no run here, whose setting this could be")
    settings.check_alone()
    resources = {"gpus_per_rank": int(settings.uses_gpus)}
    values = {"name": f"bench-{name}", "runs_dir": str(runs_dir.absolute()), "resources": resources}
    config = parse_config({**values, "model": {"source": "tiny"}})
    if (config.run_dir / CONFIG_FILE).exists():
        raise ConfigError(
            f"bench {name} works in {config.run_dir}, which is the folder of a run; choose another --runs-dir"
        )
    return None, config


def _rows_path(name: str, chosen: Path | None, run_dir: Path | None, folder: Path) -> Path:
    if chosen is not None:
        return chosen.absolute()
    return folder / f"{name}-rows.json" if run_dir is None else run_dir / "bench" / f"{name}-rows.json"


def parse_settings(kind: type[BenchSettings], given: Mapping[str, Any]) -> BenchSettings:
    """Return the settings that the options ask for.

    Args:
        given: The value of each option, None for one that was not given; a list is text with commas.

    Raises:
        ConfigError: A value is not allowed; the message has one line for each.
    """
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if _is_list(kind.model_fields[key]):
            values[key] = [part for part in value.split(",") if part]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from error


def _option(key: str, field: FieldInfo) -> Any:
    """Return a settings field as the annotation of a Typer option, whose value is None if the option is not given."""
    name = key.replace("_", "-")
    kind = _type_of(field.annotation)
    names = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    return Annotated[kind | None, typer.Option(names, help=_help(field))]


def _type_of(annotation: Any) -> type:
    """Return the type that Typer converts to: bool, int or Path, or else str, which the settings then validate."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if annotation in (bool, int, Path) else str


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _help(field: FieldInfo) -> str:
    """Return a field's docstring with its default, as one line."""
    text = " ".join((field.description or "").split())
    if field.default in (None, ()):
        return text
    return f"{text} By default {_word(field.default)}."


def _word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _command_line(name: str, run: str | None, settings: BenchSettings, changes: tuple[str, ...]) -> str:
    """Return the command that asks for these settings and changes."""
    words = ["specrl", "bench", name, *(["--run", run] if run is not None else [])]
    for key, value in settings.model_dump(mode="json", exclude_defaults=True).items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", _word(value)]
    words += [word for change in changes for word in ("--set", change)]
    return shlex.join(words)
