"""What a replay of the drafting control needs of a run: responses with every draft's fate, and times of iterations."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specrl.artifacts import write_json

RECORDING_FILE = "recording.json"


@dataclass(frozen=True)
class RecordedResponse:
    """One response of the run's policy, with the fate of a draft after each of its tokens."""

    prompt: int
    """Index of the prompt in `Recording.prompts`."""
    seed: int
    tokens: list[int]
    accepted: list[int]
    """accepted[i]: how many tokens of the drafter's draft after tokens[i] are the response's own; drafts have
    `Recording.longest_draft` tokens, and a shorter draft gets the smaller of its length and this number accepted."""
    accepted_before: list[int]
    """The same with the drafter as it was before RL."""


@dataclass(frozen=True)
class RecordedText:
    """A response that is used as stored text."""

    prompt: int
    seed: int
    tokens: list[int]


@dataclass(frozen=True)
class RecordedIteration:
    """One engine iteration in which every request was decoding."""

    k: int
    """Longest draft of the drafter, tokens."""
    replay_k: int
    """Longest draft from text, tokens."""
    batch: int
    """Requests."""
    drafted: int
    """Draft tokens that were verified, all requests together."""
    seconds: float
    """From one proposal of drafts to the next."""


@dataclass(frozen=True)
class Recording:
    """Everything that is replayed."""

    longest_draft: int
    """Tokens of the recorded drafts of the drafter."""
    threads: int
    prompts: list[list[int]]
    responses: list[RecordedResponse]
    earlier: list[RecordedText]
    """Responses to the same requests, seeds included, by a policy one training step before: pre-generated text."""
    others: list[RecordedText]
    """Responses to the same prompts by the same policy with other seeds."""
    iterations: list[list[RecordedIteration]]
    """Generations at fixed draft lengths, in the order in which they ran."""

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Recording:
        data = json.loads(path.read_text())
        return cls(
            longest_draft=data["longest_draft"],
            threads=data["threads"],
            prompts=data["prompts"],
            responses=[RecordedResponse(**item) for item in data["responses"]],
            earlier=[RecordedText(**item) for item in data["earlier"]],
            others=[RecordedText(**item) for item in data["others"]],
            iterations=[[RecordedIteration(**item) for item in run] for run in data["iterations"]],
        )
