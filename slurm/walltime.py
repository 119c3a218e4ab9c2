"""The wall-clock limit of a job: it is warned before the limit, ends in order, is queued again and goes on."""

from __future__ import annotations

from specrl.config import Resources

MAX_TIMEOUTS = 3
"""How many times a job that reached its time limit is queued again. With the default of `resources.minutes` that is
four hours for a stage; a stage that needs more is told to raise the limit."""
WARNING_SECONDS = 90
"""How many seconds before its limit a job is warned. A stage resumes from its last checkpoint, so the warning leaves
time for ending the ranks and not for finishing a step."""


def warning_seconds(resources: Resources) -> int:
    """Return how many seconds before its limit a job is warned: at most a quarter of the limit."""
    return min(WARNING_SECONDS, resources.minutes * 15)


def longest_minutes(resources: Resources) -> int:
    """Return how many minutes a job may run in total, over all its turns."""
    return resources.minutes * (1 + MAX_TIMEOUTS)
