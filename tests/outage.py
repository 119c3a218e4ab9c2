"""Stop MLflow for the middle third of a run, and see whether a step waits for it and whether anything is missing.

    python -m tests.outage FOLDER

Runs `configs/smoke.toml` with more steps through the command line, with a real MLflow server that is killed after a
third of the steps and started again after two thirds. Prints the times of the steps over their median as a Markdown
table, apart for steps that validate. Figures of single steps mean something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from mlflow import MlflowClient

from specrl.tracking.log import Log, Sent
from tests.integration.pipeline_runs import finish, run_smoke, wait_for
from tests.mlflow_server import MlflowServer

STEPS, VALIDATE_EVERY = 36, 3
LIMIT = 1.1
"""How many times the median a step may take while MLflow is away."""
VALIDATION = "timing/validation_s"


def run(folder: Path, server: MlflowServer) -> Path:
    """Run with the outage; return the run's folder."""
    settings = (
        f"train.num_steps={STEPS}",
        f"validate.every={VALIDATE_EVERY}",
        f"tracking.uri={server.uri}",
        "resources.cpus_per_rank=1",
    )
    flow = run_smoke(folder / "runs", *[word for setting in settings for word in ("--set", setting)])
    run_dir = folder / "runs" / "smoke"
    wait_for(run_dir, f"stages/train-*/steps/step={STEPS // 3 - 1:06d}.json", seconds=1800)
    server.kill()
    wait_for(run_dir, f"stages/train-*/steps/step={2 * STEPS // 3 - 1:06d}.json", seconds=1800)
    server.start()
    finish(flow)
    return run_dir


def check_nothing_is_missing(run_dir: Path, uri: str) -> None:
    """Check that MLflow has every metric and picture of every step, once and in order, and that nothing waits."""
    client = MlflowClient(uri)
    (stage,) = run_dir.glob("stages/train-*")
    run_id = (stage / "mlflow_run_id").read_text().strip()
    names = {name for record in records(run_dir) for name in record["metrics"]}
    for name in sorted(names):
        expected = [record["step"] for record in records(run_dir) if name in record["metrics"]]
        assert [point.step for point in client.get_metric_history(run_id, name)] == expected, name
    assert len(client.list_artifacts(run_id, "gantt")) == STEPS
    assert client.get_run(run_id).info.status == "FINISHED"
    for folder in (run_dir, *run_dir.glob("stages/*")):
        assert Sent(Log(folder)).is_complete(), folder
    print(f"MLflow has all {len(names)} metrics and the pictures of all {STEPS} steps, once; nothing waits on disk\n")


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("stages/train-*/steps/step=*.json"))]


def print_steps(run_dir: Path) -> float:
    """Print the table, and return how many times its median the slowest step took while MLflow was away."""
    metrics = [record["metrics"] for record in records(run_dir)]
    kinds = {
        "without validation": [step for step, found in enumerate(metrics) if VALIDATION not in found],
        "with validation": [step for step, found in enumerate(metrics) if VALIDATION in found],
    }
    thirds = {
        "answers": range(STEPS // 3),
        "stopped": range(STEPS // 3, 2 * STEPS // 3),
        "starts, then answers": range(2 * STEPS // 3, STEPS),
    }
    largest = 0.0
    print("| steps | MLflow | kind of step | number | median of all of the kind, s | time over this median |")
    print("|---|---|---|---:|---:|---|")
    for name, third in thirds.items():
        for kind, steps in kinds.items():
            usual = median(metrics[step]["timing/step_s"] for step in steps)
            ratios = [metrics[step]["timing/step_s"] / usual for step in steps if step in third]
            words = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {third[0]} to {third[-1]} | {name} | {kind} | {len(ratios)} | {usual:.2f} | {words} |")
            largest = max(largest, *ratios) if name == "stopped" else largest
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    server = MlflowServer(folder)
    server.start()
    try:
        run_dir = run(folder, server)
        check_nothing_is_missing(run_dir, server.uri)
    finally:
        server.kill()
    largest = print_steps(run_dir)
    verdict = "within" if largest <= LIMIT else "ABOVE"
    print(f"\nslowest step while MLflow was stopped: {largest:.2f} of the median of its kind, {verdict} {LIMIT}")


if __name__ == "__main__":
    main()
