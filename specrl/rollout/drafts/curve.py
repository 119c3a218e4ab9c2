"""What the controller has learned, as a file: tokens per iteration and per second by batch size and draft lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from specrl.artifacts import Artifact, write_text
from specrl.config import Config
from specrl.rollout.drafts.estimates import DraftLengths

CURVE_FILE = "speculation.json"


class CurvePoint(Artifact):
    """The latest iterations with drafts of one length in one range of batch sizes."""

    batch: int
    """The largest running batch size of the range; it begins above half of it."""
    k: int
    """Longest draft of the drafter, tokens."""
    replay_k: int
    """Longest draft from text, stored or recent, tokens."""
    iterations: int
    """How many iterations the point was measured in."""
    batch_mean: float
    """Mean number of requests in them."""
    acceptance_length: float
    """Tokens per request and iteration, bonus token included; requests without a draft count with 1."""
    seconds: float
    """Median time of an iteration."""
    tokens_per_s: float
    """Tokens of all requests per second."""
    chosen: bool
    """Whether the controller had settled on these lengths."""

    @classmethod
    def of(
        cls, batch: int, lengths: DraftLengths, measured: Sequence[tuple[int, int, float]], *, chosen: bool
    ) -> CurvePoint:
        """Summarise the (requests, tokens, seconds) of iterations."""
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


class SpeculationCurve(Artifact):
    """What speculation brought on this machine, with this policy and drafter; for people and for MLflow."""

    method: str
    temperature: float
    points: list[CurvePoint]


def write_curve(directory: Path, config: Config, points: list[CurvePoint]) -> Path:
    """Write what one engine's controller has learned since the stage last started; return the file's path."""
    curve = SpeculationCurve(method=config.speculation.method, temperature=config.sampling.temperature, points=points)
    path = directory / CURVE_FILE
    write_text(path, curve.model_dump_json(indent=2) + "\n")
    return path
