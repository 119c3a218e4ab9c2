"""The wall-clock limit of a job, which is warned before it, ends in an orderly way, and is queued again to go on."""

from __future__ import annotations

from specrl.config import Resources

MAX_TIMEOUTS = 3
"""How many times a job that reached its time limit is queued again. With the default of `resources.minutes`, a stage
has four hours; a stage that needs more fails with a line that names the limit."""
WARNING_SECONDS = 90
"""How many seconds before its limit a job is warned. A stage resumes from its last checkpoint, so the warning leaves
time for ending the ranks and not for finishing a step."""


def warning_seconds(resources: Resources) -> int:
    """Return how many seconds before its limit a job is warned: at most a quarter of the limit."""
    return min(WARNING_SECONDS, resources.minutes * 15)


def longest_minutes(resources: Resources) -> int:
    """Return how many minutes a job may run in total, each time that it is queued again included."""
    return resources.minutes * (1 + MAX_TIMEOUTS)
