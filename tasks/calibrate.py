"""Measure FP8 scales and the error of each layer, and decide which layers stay in BF16."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.run import Finished, Run, run_stage


@task(name="calibrate", task_run_name="calibrate", cache_policy=NO_CACHE)
def calibrate(run: Run, policy: Finished, drafter: Finished) -> Finished:
    return run_stage(run, "calibrate", policy, drafter)
