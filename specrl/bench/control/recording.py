"""The recording of a run for replays of the drafting control: responses with the outcome of drafts, and times."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json

RECORDING_FILE = "recording.json"


@dataclass(frozen=True)
class RecordedResponse:
    """One response of the run's policy, with the outcome of a draft after each of its tokens."""

    prompt: int
    """The index of the prompt in `Recording.prompts`."""
    seed: int
    tokens: list[int]
    accepted: list[int]
    """`accepted[i]` is how many tokens of the drafter's draft after `tokens[i]` are the response's own. Drafts have
    `Recording.longest_draft` tokens; of a shorter draft as many are accepted, or all of it."""
    accepted_before: list[int]
    """The numbers as in `accepted`, with the drafter as it was before RL."""
    confidences: list[list[float]] = field(default_factory=list)
    """The drafter's confidence in each token of the drafts of `accepted`; none where it does not tell."""
    confidences_before: list[list[float]] = field(default_factory=list)
    """The same of the drafts of `accepted_before`."""


@dataclass(frozen=True)
class RecordedText:
    """A response that is used as stored text."""

    prompt: int
    """The index of the prompt in `Recording.prompts`."""
    seed: int
    tokens: list[int]


@dataclass(frozen=True)
class RecordedIteration:
    """One engine iteration in which every request was decoding."""

    k: int
    """The longest draft of the drafter, in tokens."""
    replay_k: int
    """The longest draft from text, in tokens."""
    batch: int
    """The number of requests."""
    drafted: int
    """The number of draft tokens that were verified, over all requests."""
    seconds: float
    """The time from one proposal of drafts to the next."""


@dataclass(frozen=True)
class Recording:
    """Everything that is replayed."""

    longest_draft: int
    """The length of the recorded drafts of the drafter, in tokens."""
    threads: int
    """The number of threads of the engine."""
    prompts: list[list[int]]
    responses: list[RecordedResponse]
    earlier: list[RecordedText]
    """Responses to the same requests, seeds included, by a policy one training step earlier: pre-generated text."""
    others: list[RecordedText]
    """Responses to the same prompts by the same policy with other seeds."""
    iterations: list[list[RecordedIteration]]
    """The iterations of each generation at fixed draft lengths, in the order in which these ran."""
    parallel: bool
    """Whether the drafter drafts all positions in one pass, and not each in a pass of its own."""

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote.

        Raises:
            ValueError: An earlier version wrote it, which did not say what kind of drafter it recorded.
        """
        data = json.loads(path.read_text())
        if "parallel" not in data:
            raise ValueError(f"{path} does not say what kind of drafter it is of; record again with --record")
        rows: dict[str, Any] = {
            "responses": [RecordedResponse(**item) for item in data["responses"]],
            "earlier": [RecordedText(**item) for item in data["earlier"]],
            "others": [RecordedText(**item) for item in data["others"]],
            "iterations": [[RecordedIteration(**item) for item in run] for run in data["iterations"]],
        }
        return cls(**{**data, **rows})
