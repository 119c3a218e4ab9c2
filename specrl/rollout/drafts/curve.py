"""What the controller has measured: tokens per iteration and second by batch size and draft lengths."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from specrl.artifacts import Artifact
from specrl.rollout.drafts.estimates import DraftLengths


class CurvePoint(Artifact):
    """The latest iterations with one choice of draft lengths in one range of batch sizes."""

    batch: int
    """The largest running batch size of the range; it begins above half of it."""
    k: int
    """The longest draft of the drafter, in tokens."""
    replay_k: int
    """The longest draft from text, stored or recent, in tokens."""
    iterations: int
    """The number of iterations that the point was measured in."""
    batch_mean: float
    """The mean number of requests in these iterations."""
    acceptance_length: float
    """The tokens per request and iteration, bonus token included; a request without a draft counts as 1."""
    seconds: float
    """The median time of an iteration."""
    tokens_per_s: float
    """The tokens of all requests per second."""
    chosen: bool
    """Whether these were the lengths that the controller had chosen."""

    @classmethod
    def of(
        cls, batch: int, lengths: DraftLengths, measured: Sequence[tuple[int, int, float]], *, chosen: bool
    ) -> CurvePoint:
        """Return the point that summarises the (requests, tokens, seconds) of at least one iteration."""
        requests, tokens, seconds = (sum(column) for column in zip(*measured, strict=True))
        return cls(
            batch=batch,
            k=lengths.k,
            replay_k=lengths.replay_k,
            iterations=len(measured),
            batch_mean=requests / len(measured),
            acceptance_length=tokens / requests,
            seconds=median(row[2] for row in measured),
            tokens_per_s=tokens / seconds,
            chosen=chosen,
        )
