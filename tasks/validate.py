"""Measure the accuracy on held-out prompts before and after, and the speed with and without speculation."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.run import Finished, Run, run_stage


@task(name="validate", task_run_name="validate", cache_policy=NO_CACHE)
def validate(run: Run, policy: Finished, drafter: Finished, trained: Finished) -> Finished:
    return run_stage(run, "validate", policy, drafter, trained)
