"""Make the policy's Hugging Face folder, after a short supervised warm start if one is configured."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.run import Finished, Run, run_stage


@task(name="prepare", task_run_name="prepare", cache_policy=NO_CACHE)
def prepare(run: Run) -> Finished:
    return run_stage(run, "prepare")
