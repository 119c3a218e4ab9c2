"""`specrl bench control`: what each constant of the drafting control is worth, on a recorded run.

The engine runs once, to record; everything else is replayed without it, by the classes that control the engine.
"""

from __future__ import annotations

import time

from specrl.bench.control import report
from specrl.bench.control.ablation import (
    ALTERNATIVES,
    CONTROLLER_WORKLOADS,
    TEXT_WORKLOADS,
    Bench,
    Worth,
    bubble_worths,
)
from specrl.bench.control.bubbles import BubbleStep, bubble_steps
from specrl.bench.control.machine import Machine, accelerator, fit
from specrl.bench.control.record import record
from specrl.bench.control.recording import RECORDING_FILE, Recording
from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.settings import ControlBenchSettings
from specrl.bench.subject import find_subject
from specrl.distributed import join, leave
from specrl.step_record import read_steps


def main(job: BenchJob) -> None:
    """Record, unless that was done before, replay every alternative, and write the page."""
    settings, started = ControlBenchSettings.model_validate(job.settings), time.monotonic()
    recording = load_or_record(job, again=settings.record)
    machine = fit(recording.iterations)
    machines = {"recorded": machine, "accelerator": accelerator(machine.noise)}
    bench = Bench(recording, machines, range(settings.seeds))
    efficiencies = {workload.name: bench.efficiency(workload) for workload in CONTROLLER_WORKLOADS}
    worths: list[Worth] = []
    for alternative in ALTERNATIVES:
        worths.append(bench.worth(alternative, TEXT_WORKLOADS if alternative.is_of_text else CONTROLLER_WORKLOADS))
    steps = recorded_bubbles(job)
    shares = bubble_worths(steps, range(settings.seeds)) if steps else []
    write_rows(job.json_path, [worth.row() for worth in worths])
    report.write(
        job, report.Findings(recording, machine, efficiencies, worths, shares, len(steps), time.monotonic() - started)
    )


def load_or_record(job: BenchJob, again: bool) -> Recording:
    path = job.run_dir / "bench" / "control" / RECORDING_FILE
    if again or not path.is_file():
        join()
        record(find_subject(job.run_dir)).save(path)
        leave()
    return Recording.load(path)


def recorded_bubbles(job: BenchJob) -> list[BubbleStep]:
    """Return the steps of the run's `bench bubbles` with both uses of idle time; none where it was not run."""
    directory = job.run_dir / "bench" / "bubbles" / "both" / "stage" / "steps"
    return bubble_steps(read_steps(directory)) if directory.is_dir() else []
