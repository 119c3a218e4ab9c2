"""`specrl bench control`: measure on a recorded run what each constant of the drafting control is worth.

The engine runs once, to record. Everything else is replayed without it, by the very classes that steer the engine.
"""

from __future__ import annotations

import time

from specrl.bench.control.ablation import (
    CONTROLLER_CONSTANTS,
    CONTROLLER_WORKLOADS,
    SHARE_CONSTANTS,
    TEXT_CONSTANTS,
    TEXT_WORKLOADS,
    Alternative,
    Bench,
    bubble_worth,
)
from specrl.bench.control.bubbles import BubbleTrace, bubble_trace
from specrl.bench.control.machine import accelerator, fit
from specrl.bench.control.page import ControlFindings, write_page
from specrl.bench.control.record import record
from specrl.bench.control.recording import RECORDING_FILE, Recording
from specrl.bench.job import BenchJob
from specrl.bench.pages import write_rows
from specrl.bench.settings import ControlBenchSettings
from specrl.distributed import join, leave
from specrl.step_record import read_steps


def main(job: BenchJob) -> None:
    """Record, unless that was done before, replay every alternative, and write the page."""
    settings, started = ControlBenchSettings.model_validate(job.settings), time.monotonic()
    recording = load_or_record(job, again=settings.record)
    machine = fit(recording.iterations, parallel=recording.parallel)
    machines = {"recorded": machine, "accelerator": accelerator(machine.noise, parallel=recording.parallel)}
    bench = Bench(recording, machines, range(settings.seeds))
    workloads = [workload.within(recording.longest_draft) for workload in CONTROLLER_WORKLOADS]
    text_workloads = [workload.within(recording.longest_draft) for workload in TEXT_WORKLOADS]
    bubbles = recorded_bubbles(job)
    shares = [bubble_worth(bubbles, item, bench.seeds) for item in Alternative.all(SHARE_CONSTANTS) if bubbles.tells]
    findings = ControlFindings(
        recording=recording,
        machine=machine,
        efficiencies={workload.name: bench.efficiency(workload) for workload in workloads},
        controller=[bench.worth(item, workloads) for item in Alternative.all(CONTROLLER_CONSTANTS)],
        text=[bench.worth(item, text_workloads) for item in Alternative.all(TEXT_CONSTANTS)],
        shares=shares,
        bubbles=bubbles,
        num_seeds=settings.seeds,
        seconds=time.monotonic() - started,
    )
    write_rows(job.json_path, [worth.row() for worth in (*findings.controller, *findings.text, *findings.shares)])
    write_page(job, findings)


def load_or_record(job: BenchJob, again: bool) -> Recording:
    """Return the recording of the run; make it first if there is none yet, or if `again` is true."""
    path = job.folder / RECORDING_FILE
    if again or not path.is_file():
        join()
        record(job.subject).save(path)
        leave()
    return Recording.load(path)


def recorded_bubbles(job: BenchJob) -> BubbleTrace:
    """Return what the run's `bench bubbles` recorded of both uses of idle time; empty if it did not run."""
    directory = job.run_dir / "bench" / "bubbles" / "both" / "stage" / "steps"
    return bubble_trace(read_steps(directory) if directory.is_dir() else [])
