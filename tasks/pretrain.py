"""Generate the policy's own responses to task prompts, and train a drafter on them."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.run import Finished, Run, run_stage


@task(name="pretrain", task_run_name="pretrain", cache_policy=NO_CACHE)
def pretrain(run: Run, policy: Finished) -> Finished:
    return run_stage(run, "pretrain", policy)
