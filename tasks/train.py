"""Train the policy by reinforcement learning with speculative rollouts."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.run import Finished, Run, run_stage


@task(name="train", task_run_name="train", cache_policy=NO_CACHE)
def train(run: Run, policy: Finished, drafter: Finished, scales: Finished) -> Finished:
    return run_stage(run, "train", policy, drafter, scales)
