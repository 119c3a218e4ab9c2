"""What the controller has learned, as a file: tokens per iteration and per second by batch size and draft length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from specrl.artifacts import Artifact, write_text
from specrl.config import Config
from specrl.rollout.drafts.estimates import DraftLengths

CURVE_FILE = "speculation.json"


class CurvePoint(Artifact):
    """One range of batch sizes with drafts of one length: its latest iterations."""

    batch: int
    """The largest running batch size of the range; it begins above half of it."""
    k: int
    """Longest draft of the drafter, tokens."""
    replay_k: int
    """Longest draft from stored text, tokens."""
    iterations: int
    """How many were measured."""
    batch_mean: float
    """Mean number of requests in them."""
    acceptance_length: float
    """Tokens per request and iteration, bonus token included; requests without a draft count with 1."""
    seconds: float
    """Of an iteration, median."""
    tokens_per_s: float
    chosen: bool
    """The controller had settled on it."""

    @classmethod
    def of(
        cls, batch: int, lengths: DraftLengths, measured: Sequence[tuple[int, int, float]], *, chosen: bool
    ) -> CurvePoint:
        """From (requests, tokens, seconds) of iterations."""
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
    """`specrl project` reads it: how speculation behaves on this machine, with this policy and drafter."""

    method: str
    temperature: float
    points: list[CurvePoint]


def write_curve(directory: Path, config: Config, points: list[CurvePoint]) -> Path:
    """What one engine's controller learned since the stage last started."""
    curve = SpeculationCurve(method=config.speculation.method, temperature=config.sampling.temperature, points=points)
    path = directory / CURVE_FILE
    write_text(path, curve.model_dump_json(indent=2) + "\n")
    return path


def read_curve(path: Path) -> SpeculationCurve:
    return SpeculationCurve.model_validate_json(path.read_text())
