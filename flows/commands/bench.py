"""`specrl bench`: measure a finished run's policy and drafter, or the machine's GPU.

Every benchmark is one row of `BENCHMARKS`: its sub-command has an option for each field of its settings, beside those
that all benchmarks share.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flows.commands.options import RunsDir
from flows.folder import find_run
from slurm.backend import JobError
from slurm.environment import THREAD_VARIABLES
from slurm.failures import last_error
from specrl.bench.job import BenchJob
from specrl.bench.pages import default_page
from specrl.bench.settings import (
    AgreementSettings,
    BenchSettings,
    BubbleSettings,
    CheckpointSettings,
    ControlBenchSettings,
    DrafterSettings,
    ExchangeSettings,
    GpuSettings,
    PlanSettings,
    PrecisionSettings,
    RolloutSettings,
)
from specrl.bench.subject import find_subject
from specrl.config import ConfigError, Resources
from specrl.config.errors import explain
from specrl.report.results import CONFIG_FILE
from specrl.tracking import log_files

BENCHMARKS: Mapping[str, type[BenchSettings]] = {
    "rollouts": RolloutSettings,
    "drafter": DrafterSettings,
    "bubbles": BubbleSettings,
    "agreement": AgreementSettings,
    "precision": PrecisionSettings,
    "control": ControlBenchSettings,
    "checkpoints": CheckpointSettings,
    "exchange": ExchangeSettings,
    "plan": PlanSettings,
    "gpu": GpuSettings,
}
"""The settings of each benchmark; its code is `specrl.bench.NAME.main`."""
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
}
DEFAULTS = {"run": Parameter.empty, "json_path": None, "page": None, "runs_dir": Path("runs")}

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

    def measure(**given: Any) -> None:
        shared = {key: given.pop(key) for key in known}
        threads = 1 if "threads" in kind.model_fields else given.pop("threads")
        settings = parse_settings(kind, given)
        if kind.needs_run:
            execute(name, settings=settings, threads=threads, **shared)
        else:
            execute_alone(name, settings=settings, threads=threads, **shared)

    options = {key: _option(key, field) for key, field in kind.model_fields.items()}
    annotations: dict[str, Any] = {**known, "threads": THREADS, **options}
    measure.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(key, Parameter.KEYWORD_ONLY, default=DEFAULTS.get(key), annotation=annotation)
            for key, annotation in annotations.items()
        ]
    )
    measure.__doc__ = kind.__doc__
    return measure


def execute(
    name: str,
    run: str,
    runs_dir: Path,
    settings: BenchSettings,
    json_path: Path | None,
    page: Path | None,
    threads: int | None,
) -> None:
    """Run `specrl.bench.NAME.main:main` in a process of its own, with a rank's environment, and wait for it.

    Raises:
        ConfigError: The run does not exist or has not finished training, or the settings do not fit it.
        JobError: The benchmark failed.
    """
    run_dir = find_run(run, runs_dir)
    config = find_subject(run_dir).config
    settings.check(config)  # a mistake shows before anything starts
    job = BenchJob(
        entry=f"specrl.bench.{name}.main:main",
        run_dir=run_dir,
        settings=settings.model_dump(mode="json"),
        command=_command_line(name, run, settings),
        page=(page or default_page(name)).absolute(),
        json_path=json_path.absolute() if json_path else run_dir / "bench" / f"{name}-rows.json",
    )
    _run(name, job, _environment(config.resources_of("validate"), threads))
    pictures = sorted(job.page.parent.glob(f"{job.page.stem}-*.svg"))
    log_files(config, {f"bench/{name}": [job.page, *pictures, job.json_path]})


def execute_alone(
    name: str, runs_dir: Path, settings: BenchSettings, json_path: Path | None, page: Path | None, threads: int | None
) -> None:
    """Run a benchmark that needs no finished run, in the folder RUNS_DIR/bench-NAME.

    Raises:
        ConfigError: That folder is a run's.
        JobError: The benchmark failed, in whole or in part.
    """
    folder = (runs_dir / f"bench-{name}").absolute()
    if (folder / CONFIG_FILE).exists():
        raise ConfigError(f"bench {name} works in {folder}, which is the folder of a run; choose another --runs-dir")
    if not settings.goes_on:
        shutil.rmtree(folder, ignore_errors=True)
    job = BenchJob(
        entry=f"specrl.bench.{name}.main:main",
        run_dir=folder,
        settings=settings.model_dump(mode="json"),
        command=_command_line(name, None, settings),
        page=(page or default_page(name)).absolute(),
        json_path=json_path.absolute() if json_path else folder / f"{name}-rows.json",
    )
    _run(name, job, _environment(None if settings.uses_gpus else Resources(), threads))


def _run(name: str, job: BenchJob, environment: Mapping[str, str]) -> None:
    """Run a benchmark in a process of its own, and wait for it.

    Raises:
        JobError: It failed.
    """
    job_path = job.run_dir / "bench" / f"{name}.json"
    job.save(job_path)
    log = job_path.with_suffix(".log")
    with log.open("wb") as errors:
        process = [sys.executable, "-m", "specrl.bench.job", str(job_path), str(os.getpid())]
        code = subprocess.run(process, env=environment, stderr=errors, check=False).returncode
    if code:
        raise JobError(f"bench {name} failed: {last_error(log.read_text(errors='replace'))}; log: {log}")
    print(f"page: {job.page}")


def _environment(resources: Resources | None, threads: int | None) -> dict[str, str]:
    """Return the environment of a benchmark's process, with the threads and the devices of a rank.

    Args:
        resources: The rank's resources; None for all cores and devices of this machine.
        threads: The number of CPU threads; None for those of the rank.
    """
    cores = len(os.sched_getaffinity(0))
    count = str(threads or (cores if resources is None else min(resources.cpus_per_rank, cores)))
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, count), "TOKENIZERS_PARALLELISM": "false"}
    if resources is not None and not resources.gpus_per_rank:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


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


def _command_line(name: str, run: str | None, settings: BenchSettings) -> str:
    """Return the command that asks for these settings."""
    words = ["specrl", "bench", name, *(["--run", run] if run is not None else [])]
    for key, value in settings.model_dump(mode="json", exclude_defaults=True).items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", _word(value)]
    return shlex.join(words)
