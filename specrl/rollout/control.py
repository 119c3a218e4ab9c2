"""Every constant that steers drafting and the use of idle time, in one place.

They decide how long a rollout takes, never which tokens it has. None needs setting for a new model or machine: what
depends on those is measured while generating. `specrl bench control` measures what each one is worth.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSettings:
    """The constants of the draft-length controller, its estimates, drafts from text and the sharing of idle time."""

    # How long drafts may be.
    draft_lengths: tuple[int, ...] = (0, 1, 2, 3, 5, 8)
    """Lengths of the drafter's drafts to choose from, tokens, up to and together with `speculation.k`."""
    replay_lengths: tuple[int, ...] = (0, 4, 8, 16)
    """Lengths of drafts from text to choose from, tokens, up to and together with `speculation.replay_k`."""
    first_draft_length: int = 3
    """The drafter's longest draft while nothing is known, tokens."""
    first_replay_length: int = 8
    """The longest draft from text while nothing is known, tokens."""
    first_batch: int = 8
    """The largest batch that begins with drafts while nothing is known, requests."""

    # What is tried, and when.
    trial_iterations: int = 4
    """Iterations that a trial measures other draft lengths for, before it compares them with the chosen ones."""
    trial_patience: int = 3
    """Factor on `trial_iterations`: a trial that could not measure enough iterations within so many gives up."""
    exploration: float = 0.1
    """Probability of a trial after each `trial_iterations`, if the other lengths were as good as the chosen ones."""
    exploration_shyness: float = 15.0
    """Lengths worse by g, in log tokens per second, are tried with e^(-shyness g) of that probability."""
    refresh_factor: float = 3.0
    """Factor on `exploration` after a refit."""
    refresh_iterations: int = 64
    """How long that lasts, iterations."""
    calibration_trials: int = 2
    """Trials of every plausible choice at a new batch size before `exploration` limits them."""
    close: float = 0.05
    """Lengths within this of the chosen ones, in log tokens per second, are tried until `trial_window` is full."""
    plausible: float = 0.3
    """Lengths that similar batch sizes show to be worse by more than this, in log tokens per second, are not tried."""
    switch_margin: float = 0.005
    """Other lengths must be better by this to be chosen, in log tokens per second."""
    trial_window: int = 12
    """Latest trials of a choice whose mean time counts."""

    # What is expected of draft lengths.
    estimate_window: float = 500.0
    """Iterations after which an observation of accepted tokens counts 1/e."""
    prior_requests: float = 8.0
    """Weight of a guess of the tokens per iteration, in requests x iterations."""
    shared_requests: float = 200.0
    """Weight of all batch sizes' tokens per iteration beside one batch size's own, in requests x iterations."""
    guessed_acceptance: float = 0.6
    """Probability that a draft token is accepted after accepted ones, before anything was seen."""
    continuation: float = 0.8
    """Share of the last step's gain that a further step of draft length is expected to bring."""
    kept_on_refit: float = 0.1
    """Weight that observations of accepted tokens keep at a refit."""
    guessed_draft_cost: float = 0.1
    """Log time that each token of the drafter's drafts adds to an iteration, before anything was measured."""
    guessed_replay_cost: float = 0.02
    """Log time that each token of drafts from text adds to an iteration, before anything was measured."""

    # How far text is drafted.
    guessed_own_seed: float = 0.97
    """Probability that a token of the text of a request's own seed is right, before anything was seen."""
    guessed_replay: float = 0.5
    """The same for stored text of the prompt that agrees by no token."""
    guessed_recent: float = 0.3
    """The same for recent responses."""
    guessed_per_token: float = 0.05
    """What each token of agreement adds to these."""
    prior_drafts: float = 4.0
    """Weight of these guesses, in drafts."""
    least_probability: float = 0.25
    """Text is drafted as long as all of the draft is right with this probability."""
    text_window: float = 1000.0
    """Drafts after which an observation of text counts 1/e."""
    drafter_window: float = 100.0
    """Drafts over which the accepted tokens of the drafter's drafts are averaged."""

    # Where text is found.
    longest_suffix: int = 8
    """Last tokens of a response that are compared with text, at most."""
    shortest_suffix: int = 2
    """Last tokens that must agree for text to be drafted."""
    recent_suffix: int = 4
    """Last tokens that are looked up in recent responses first, before `shortest_suffix`."""
    most_followed: int = 64
    """Places in stored text that are followed at once."""
    most_places: int = 256
    """Places of a pair of tokens in stored text that are looked at."""
    most_recent_places: int = 64
    """Latest places of a suffix in recent responses that are looked at."""
    recent_kept: float = 0.5
    """Share of `speculation.recent_tokens` that is kept when there are more."""

    # How idle time is shared out.
    least_share: float = 0.1
    """Share of idle time for each use at least, so that both keep being measured."""
    rate_memory: float = 0.5
    """Weight of earlier steps' measurements of each use, in every step."""
    debt_memory: float = 0.8
    """Weight of earlier bubbles' seconds of each use, in every step."""
    least_period: float = 0.2
    """Seconds that are shared out at least."""
    shortest_pregeneration: float = 0.02
    """Pre-generation that has fewer seconds left to it is not begun, seconds."""
    expected_bubbles: int = 4
    """Latest bubbles of a rank whose mean length is expected of its next."""
