"""Every constant that steers drafting and the use of idle time, in one place.

They decide how long a rollout takes, never which tokens it has. None needs setting for a new model or machine: what
depends on those is measured while generating.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSettings:
    """The constants of the choice of draft lengths, and of sharing idle time."""

    time_window: float = 8.0
    """The number of iterations after which an observation of an iteration's time has a weight of 1/e."""

    # What is expected of drafts.
    guessed_acceptance: float = 0.6
    """The assumed probability that the next token of a draft is accepted too, before any was seen."""
    prior_requests: float = 25.0
    """The weight, in requests x iterations, of a guess of the tokens per iteration, and, in the estimate for one batch
    size, of what all batch sizes together have shown."""
    even_agreement: float = 2.0
    """The number of agreeing tokens at which text is guessed to continue with the right token half of the time."""
    prior_drafts: float = 4.0
    """The weight of that guess, in drafts."""
    text_window: int = 500
    """The number of drafts after which an observation of a draft from text has a weight of 1/e, and over which the
    accepted tokens of the drafter's drafts are averaged."""
    worthwhile: float = 0.01
    """The share by which tokens per second must be expected to rise for drafted tokens to be left unverified."""

    # What is kept from one training step to the next, and how idle time is shared out.
    kept_on_refit: float = 0.1
    """The factor on the weight of observations of accepted tokens at every refit."""
    least_share: float = 0.1
    """The least share of idle time for either use, so that both keep being measured."""
    share_memory: float = 0.75
    """The weight of earlier steps in the running means of each use's gain and of a bubble's length."""
    debt_memory: float = 0.8
    """The factor, at every step, on the seconds that each use had in earlier bubbles. They count so that a use that got
    less than its share gets more later."""
