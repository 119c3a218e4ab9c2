"""`specrl bench growth`: measure a step at every point of the series, then write the rows and the page."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specrl.bench import arithmetic
from specrl.bench.arithmetic import Machine
from specrl.bench.growth.fit import PointTimes, growth
from specrl.bench.growth.inputs import make_context
from specrl.bench.growth.page import write_page
from specrl.bench.growth.points import MODELS, Point, series_of
from specrl.bench.interleaved.side import PARTS, TrainStep, begin_anew, train_side
from specrl.bench.job import BenchJob, say
from specrl.bench.pages import write_rows
from specrl.bench.rollouts.machine import measure_machine
from specrl.bench.settings import GrowthSettings


def main(job: BenchJob) -> None:
    """Measure every point once, though several series may have it, and write the rows and the page."""
    settings = GrowthSettings.model_validate(job.settings)
    machines: dict[str, Machine] = {}
    measured: dict[Point, tuple[dict[str, float], dict[str, float]]] = {}
    times: dict[str, list[PointTimes]] = {}
    rows: list[dict[str, Any]] = []
    for series in series_of(settings):
        for size, point in series.points.items():
            if point.model not in machines:
                machines[point.model] = measure_machine(MODELS[point.model], threads=1)
            if point not in measured:
                measured[point] = measure(point, job.run_dir / f"point-{len(measured)}", settings, machines)
            item = PointTimes(size, point, *measured[point])
            times.setdefault(series.name, []).append(item)
            rows.append({"series": series.name, "size": size, **asdict(point), "seconds": item.seconds})
            rows[-1]["least"] = item.least
            write_rows(job.json_path, rows)  # what is measured stays if a later point fails
    found = [item for name, points in times.items() if len(points) > 1 for item in growth(name, points)]
    write_rows(job.json_path, [*rows, *({**asdict(item), "too_fast": item.too_fast} for item in found)])
    write_page(job, times, found)


def measure(
    point: Point, folder: Path, settings: GrowthSettings, machines: dict[str, Machine]
) -> tuple[dict[str, float], dict[str, float]]:
    """Take the steps of one point in processes of its own.

    Returns:
        The seconds of each part in the fastest step, and the least ones by the arithmetic of that step.
    """
    context = make_context(point, folder, settings.warm_up + settings.steps)
    begin_anew(context, folder / "train")
    with train_side(context, folder / "train") as side:
        steps = [side.step() for _ in range(settings.warm_up + settings.steps)][settings.warm_up :]
    best = min(steps, key=lambda step: step.seconds("step"))  # other work on the machine can only slow a step down
    seconds = {part: best.seconds(part) for part in ("step", *PARTS)} | {"other": best.other_s}
    say(f"{point.words}: {seconds['step']:.2f} s")
    return seconds, least_seconds(point, best, context.stage_dir / "rollouts", machines[point.model])


def least_seconds(point: Point, step: TrainStep, rollouts_dir: Path, machine: Machine) -> dict[str, float]:
    """Return the seconds of a step's arithmetic; ranks work at the same time, as far as there are cores."""
    rollouts = step.rollouts(rollouts_dir)
    prompts = [len(rollout.prompt_tokens) for rollout in rollouts]
    responses = [len(rollout.response_tokens) for rollout in rollouts]
    shape, at_once = MODELS[point.model], min(point.ranks, len(os.sched_getaffinity(0)))
    ranks = [slice(rank, None, point.ranks) for rank in range(point.ranks)]
    generated = [arithmetic.generation_s(shape, prompts[own], responses[own], machine) for own in ranks]
    least = {
        "generation": sum(generated) / at_once,
        "policy_update": arithmetic.update_s(shape, prompts, responses, machine) / at_once,
        "refit": arithmetic.refit_s(shape, machine) * point.ranks / at_once,
    }
    return {**least, "step": sum(least.values())}
