"""Every constant that steers drafting and the use of idle time, in one place.

They decide how long a rollout takes, never which tokens it has. None needs setting for a new model or machine: what
depends on those is measured while generating. `specrl bench control` measures what each one is worth.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSettings:
    """The constants of the draft-length controller, its estimates, drafts from text and the sharing of idle time."""

    # What is tried, and when.
    trial_iterations: int = 4
    """Iterations that a trial measures other draft lengths for, before it compares them with the chosen ones."""
    trial_window: int = 12
    """Latest trials of draft lengths whose mean time counts."""
    exploration: float = 0.1
    """Probability of a trial after every `trial_iterations`, if the other lengths were as good as the chosen ones."""
    plausible: float = 0.2
    """Lengths that are worse by this much or more, in log tokens per second, are not tried; the probability of a trial
    falls with the square of the distance to it."""

    # What is expected of drafts.
    guessed_acceptance: float = 0.6
    """Probability that a draft token is accepted after accepted ones, before the controller has seen any."""
    prior_requests: float = 25.0
    """Weight of a guess of the tokens per iteration, and of all batch sizes' beside one's own, in requests x
    iterations."""
    even_agreement: float = 2.0
    """Text that agrees with a response by so many tokens is guessed to go on with the right token as often as not."""
    prior_drafts: float = 4.0
    """Weight of this guess, in drafts."""
    text_window: int = 500
    """Drafts after which an observation of drafts from text counts 1/e, and over which the drafter's are averaged."""
    least_probability: float = 0.25
    """Text is drafted as long as all of the draft is right with this probability."""

    # Where text is found.
    longest_suffix: int = 8
    """Last tokens of a response that are compared with text; more are as good."""
    most_places: int = 64
    """Places in text that are looked at, and followed, at once."""

    # What is kept from one training step to the next, and how idle time is shared out.
    kept_on_refit: float = 0.1
    """Weight that observations of accepted tokens keep at a refit."""
    least_share: float = 0.1
    """Share of idle time for each use at least, so that both keep being measured."""
    share_memory: float = 0.5
    """Weight of earlier steps in what each use of idle time brings, and in how long a bubble is expected to be."""
    debt_memory: float = 0.8
    """Weight of earlier bubbles' seconds of each use, in every step: what was too short once is made up for."""
    least_period: float = 0.2
    """Seconds of idle time that are shared out at least."""
