"""Three cells through the real flow, jobs and MLflow, one after another: `python -m tests.slurm.dummy_sweep RUNS_DIR`.

The first one fails; the others simulate what is published, which needs no run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flows.commands.bench.jobs import BenchRequest, measure_all
from specrl.bench.settings import ProjectionSettings

from specrl.config import parse_config
from tasks.cells import CELLS, Cell, Measured, make_cell

CONFIGS = {"missing": "configs/missing.toml", "8b": "configs/qwen3-8b-rl-zero.toml", "32b": "configs/qwen3-32b.toml"}


def make_cells(measured: Measured, request: BenchRequest) -> list[Cell]:
    cells = []
    for name, path in CONFIGS.items():
        settings = ProjectionSettings(configs=(path,))
        job, parameters = request.job("projection", settings), {"config": name}
        cells.append(make_cell(measured, settings, job, request.overrides, name, parameters))
    return cells


def main(runs_dir: Path) -> None:
    config = parse_config({"name": "bench-dummy", "runs_dir": str(runs_dir), "model": {"source": "tiny"}})
    small = ("cpus_per_rank=1", "memory_gib_per_rank=0.5", "minutes=5", 'backend="slurm"')
    request = BenchRequest(
        name="projection",
        settings=ProjectionSettings(),
        command="dummy",
        page=runs_dir / "page.md",
        json_path=runs_dir / "rows.json",
        threads=1,
        overrides=[f"stage_resources.bench.{override}" for override in small],
        at_once=1,
    )
    measured = Measured(config.run_dir / "bench" / CELLS, config, None)
    for outcome in measure_all(make_cells(measured, request), measured, request):
        print(
            f"outcome {outcome.cell.label}: {outcome.error or ('cached' if outcome.cached else 'measured')}", flush=True
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
