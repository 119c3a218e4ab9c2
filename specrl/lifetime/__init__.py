"""How long a stage's jobs last: when a rank leaves its job, and the record of the jobs that a stage took."""

from specrl.lifetime.lifetime import RECENT_STEPS, LeftJobError, Lifetime, Stop, current, set_current

__all__ = ["RECENT_STEPS", "LeftJobError", "Lifetime", "Stop", "current", "set_current"]
