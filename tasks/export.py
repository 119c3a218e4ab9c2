"""Export the policy and its drafter as folders that vLLM loads, try them out and register them."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.run import Finished, Run, run_stage


@task(name="export", task_run_name="export", cache_policy=NO_CACHE)
def export(run: Run, policy: Finished, trained: Finished, validated: Finished) -> Finished:
    return run_stage(run, "export", policy, trained, validated)
