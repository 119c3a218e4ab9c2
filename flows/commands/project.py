"""`specrl project`: simulate steps of a configuration or a finished run on GPUs, or published results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import RunsDir, option
from flows.folder import find_own_run
from specrl.artifacts import write_json
from specrl.config import Config, ConfigError, load_config
from specrl.report.results import find_stages, read_config

if TYPE_CHECKING:
    from specrl.projection.simulator.step import MeasuredRun

ABOUT = "A run's name or folder, or a configuration file (.toml)."
Subject = Annotated[str | None, typer.Argument(metavar="RUN|CONFIG", help=ABOUT)]


def project(
    name: Subject = None,
    published: Annotated[bool, option("Simulate what others have published instead.", name="--published")] = False,
    hardware: Annotated[str | None, option("H100, H200 or GB200; by default chosen by gpu_memory_gib.", "NAME")] = None,
    gpus: Annotated[int | None, option("By default as many as ranks in stage train.", least=1)] = None,
    json_path: Annotated[Path | None, option("With --published: also write the rows here.", "FILE", "--json")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Simulate how long steps would take on GPUs.

    There is a row for each number of draft tokens and each use of idle time. Times are computed from the shape of the
    model and the data sheet of the GPU. Response lengths and acceptance are those of the finished run; for a
    configuration they are assumed. With --published, print published results beside simulated ones.
    """
    # These import NumPy, which other commands need not wait for.
    from specrl.projection.simulator.choices import ACCEPTANCE, hardware_of, model_of
    from specrl.projection.simulator.published import published_rows
    from specrl.report.projection import print_choices, print_published

    if published:
        rows = published_rows()
        print_published(rows)
        if json_path:
            write_json(json_path, [row.as_json() for row in rows])
        return
    if name is None:
        raise ConfigError("specrl project: name a run or a configuration file, or use --published")
    config, run = (load_config(Path(name)), None) if name.endswith(".toml") else _read(name, runs_dir)
    model = model_of(config, hardware_of(config, hardware), run, gpus)
    print_choices(name, model, (run.acceptance if run else ()) or ACCEPTANCE, config.train.num_steps)
    if run is not None:
        print(f"measured: {run.generation_s:.1f} s of generation in a step, on the run's own machines")


def _read(name: str, runs_dir: Path) -> tuple[Config, MeasuredRun]:
    from specrl.projection.simulator.step import MeasuredRun

    run_dir = find_own_run(name, runs_dir)
    stages = find_stages(run_dir)
    if "train" not in stages:
        raise ConfigError(f"run {run_dir.name} has not been trained yet; continue it with: specrl resume {name}")
    try:
        return read_config(run_dir), MeasuredRun.read(stages["train"] / "steps", stages["train"] / "rollouts")
    except ValueError as error:
        raise ConfigError(str(error)) from error
