"""Recorded responses generated again without an engine, by the classes that draft in one.

A response does not depend on its drafts, so a recorded one shows, token by token, what any draft from text would have
got accepted, and what drafts of the drafter did. Only times are a model's (`specrl.bench.control.machine`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specrl.bench.control.fixed import FixedLengths
from specrl.bench.control.machine import Machine
from specrl.bench.control.recording import RecordedResponse, RecordedText, Recording
from specrl.config import SpeculationConfig
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DraftOutcome, accepted_prefix
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.drafts.estimates import NO_DRAFTS, DraftLengths
from specrl.rollout.drafts.text_acceptance import NO_TEXT, Kind
from specrl.rollout.drafts.text_drafts import TextDrafts
from specrl.rollout.drafts.text_sources import StoredTextSource, TextCursor, text_sources

DrafterState = Literal["after", "before", "useless"]
"""The drafter of the run after RL, as it was before, or one of whose drafts nothing is accepted."""


@dataclass(frozen=True)
class Workload:
    """Generations of recorded responses, one after another, with a refit before each."""

    name: str
    method: str
    """A draft method, `speculation.method`."""
    running: int
    """Most requests that run at once."""
    requests: int
    """Responses of each generation; the recorded ones take turns."""
    drafters: tuple[DrafterState, ...]
    """The drafter of each generation."""
    k: int = 3
    """Longest draft of the drafter; 0 without one."""
    replay_k: int = 0
    """Longest draft from text; 0 without text."""
    stored: Literal["none", "earlier", "others"] = "none"
    """Text stored for the prompts: that of the same seeds by the policy one step before, or of other seeds."""
    machine: Literal["recorded", "accelerator"] = "recorded"
    fixed: DraftLengths | None = None
    """Draft lengths, where the controller is left out."""


@dataclass
class Score:
    """What a replay took."""

    tokens: int = 0
    seconds: float = 0.0
    """Expected seconds: the noise reaches the controller, but not the score."""
    decode_steps: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Running:
    """A response in progress."""

    response: RecordedResponse
    fates: Sequence[int]
    """How many tokens of the drafter's draft after each token would be accepted."""
    cursors: Mapping[str, TextCursor] = field(default_factory=dict)
    count: int = 0
    """Tokens so far."""
    kind: Kind = NO_TEXT
    drafted: int = 0
    """Tokens of the draft that is verified next."""
    accepted: int = 0
    """How many of them will be."""


class Replay:
    """A replay of one workload with one set of constants."""

    def __init__(
        self, recording: Recording, machine: Machine, workload: Workload, settings: ControlSettings, seed: int
    ) -> None:
        self.recording, self.machine, self.workload = recording, machine, workload
        self.texts = TextDrafts(text_sources(SpeculationConfig(method=workload.method), settings), settings)
        self.controller: Controller = Controller(workload.k, workload.replay_k, seed, settings)
        if workload.fixed is not None:
            self.controller = FixedLengths(workload.fixed)
        self.pauses = machine.pauses(seed)
        self.score = Score()
        self._random = random.Random(seed)
        self._longest = max(len(response.tokens) for response in recording.responses)

    def run(self) -> Score:
        """Generate all responses."""
        order: list[RecordedResponse] = []
        for drafter in self.workload.drafters:
            while len(order) < self.workload.requests:
                order += self._random.sample(self.recording.responses, len(self.recording.responses))
            batch, order = order[: self.workload.requests], order[self.workload.requests :]
            self._store(batch)
            self._generate(batch, drafter)
            self.controller.drafter_changed()
        return self.score

    def _store(self, batch: Sequence[RecordedResponse]) -> None:
        stored = next((text for text in self.texts.sources if isinstance(text, StoredTextSource)), None)
        if stored is None:
            return
        found: dict[tuple[int, ...], list[RecordedText]] = {}
        wanted, seeds = {response.prompt for response in batch}, {response.seed for response in batch}
        texts = {"earlier": self.recording.earlier, "others": self.recording.others, "none": []}[self.workload.stored]
        for text in texts:
            if text.prompt in wanted and (self.workload.stored == "others" or text.seed in seeds):
                found.setdefault(tuple(self.recording.prompts[text.prompt]), []).append(text)
        stored.store(
            {prompt: [text.tokens for text in rows] for prompt, rows in found.items()},
            {prompt: [text.seed for text in rows] for prompt, rows in found.items()},
        )

    def _generate(self, responses: Sequence[RecordedResponse], drafter: DrafterState) -> None:
        waiting = [Running(response, _fates(response, drafter)) for response in reversed(responses)]
        running: list[Running] = []
        verified = NO_DRAFTS
        self.texts.begin(recall=True)
        follows = False
        while waiting or running:
            prompts = 0
            while waiting and len(running) < self.workload.running:
                running.append(waiting.pop())
                prompts += len(self.recording.prompts[running[-1].response.prompt])
            drafted = sum(item.drafted for item in running)
            outcomes = self._verify(running)
            lengths = self.controller.choose(len(running))
            passes = self._draft(running, lengths)
            seconds = self.machine.seconds(len(running), drafted + prompts, passes)
            self.score.seconds += seconds
            self.score.decode_steps += 1
            if follows and not prompts:
                measured = seconds * self.pauses.factor()
                self.controller.observe(len(running), verified, measured if verified == lengths else None, outcomes)
            verified, follows = lengths, True
            for item in running:
                if item.count == len(item.response.tokens):
                    self.texts.remember(item.response.tokens)
            running = [item for item in running if item.count < len(item.response.tokens)]

    def _verify(self, running: Sequence[Running]) -> list[DraftOutcome]:
        """Give every request its accepted draft tokens and one more; learn what became of the drafts."""
        outcomes = []
        for item in running:
            tokens = item.response.tokens
            if item.count == 0:
                prompt = self.recording.prompts[item.response.prompt]
                item.cursors = self.texts.cursors(prompt, item.response.seed)
            elif item.drafted:
                source, agreement = item.kind
                outcomes.append(DraftOutcome(source, item.drafted, item.accepted, agreement))
            end = min(item.count + item.accepted + 1, len(tokens))
            for cursor in item.cursors.values():
                cursor.advance(tokens[item.count : end])
            self.score.tokens += end - item.count
            item.count = end
        self.texts.acceptance.observe(outcomes)
        return outcomes

    def _draft(self, running: Sequence[Running], lengths: DraftLengths) -> int:
        """Give every request its next draft; return the passes of the drafter that it takes."""
        drafts = [self.texts.draft(item.cursors, lengths) for item in running]
        passes = 0 if all(text for _, text in drafts) else lengths.k
        for item, (kind, text) in zip(running, drafts, strict=True):
            room = max(0, self._longest - item.count - 1)
            rest = item.response.tokens[item.count :]
            item.kind = kind if text else NO_TEXT
            if text:
                item.drafted = min(len(text), room)
                item.accepted = accepted_prefix(text[: item.drafted], rest)
            else:
                item.drafted = min(passes, room)
                item.accepted = min(item.drafted, item.fates[item.count - 1], len(rest))
        return passes


def _fates(response: RecordedResponse, drafter: DrafterState) -> Sequence[int]:
    if drafter == "useless":
        return [0] * len(response.tokens)
    return response.accepted if drafter == "after" else response.accepted_before
