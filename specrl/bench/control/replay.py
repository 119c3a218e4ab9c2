"""Replay recorded responses without an engine, with the classes that choose and judge drafts in one.

A response does not depend on its drafts. So a recorded one shows, token by token, how much of any draft from text would
have been accepted, and how much of the drafter's drafts was. Only times are modelled (`specrl.bench.control.machine`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from specrl.bench.control.fixed import FixedLengths
from specrl.bench.control.machine import Machine
from specrl.bench.control.recording import RecordedResponse, RecordedText, Recording
from specrl.config import SpeculationConfig
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DraftOutcome, accepted_prefix
from specrl.rollout.drafts.confidence import as_matrix
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.drafts.estimates import NO_DRAFTS, DraftLengths
from specrl.rollout.drafts.text_acceptance import NO_TEXT, Kind
from specrl.rollout.drafts.text_drafts import TextDrafts
from specrl.rollout.drafts.text_sources import StoredTextSource, TextCursor, text_sources

DrafterState = Literal["after", "before", "useless"]
"""The run's drafter after RL, the one before RL, or one whose drafts are never accepted."""


@dataclass(frozen=True)
class Workload:
    """Generations of recorded responses, one after another, with a refit after each."""

    name: str
    method: str
    """A draft method, `speculation.method`."""
    running: int
    """The most requests that run at once."""
    requests: int
    """The number of responses in each generation; the recorded ones take turns."""
    drafters: tuple[DrafterState, ...]
    """The drafter of each generation."""
    k: int = 3
    """The longest draft of the drafter, in tokens; 0 without a drafter."""
    replay_k: int = 0
    """The longest draft from text, in tokens; 0 without text."""
    stored: Literal["none", "earlier", "others"] = "none"
    """The text stored for the prompts: of the same seeds by the policy one step earlier, of other seeds, or none."""
    machine: Literal["recorded", "accelerator"] = "recorded"
    """The machine whose times are modelled."""
    fixed: DraftLengths | None = None
    """The draft lengths to use instead of the controller's; None for the controller."""

    def within(self, longest: int) -> Workload:
        """Return the workload with at most so many tokens in a draft of the drafter."""
        fixed = None if self.fixed is None else self.fixed._replace(k=min(self.fixed.k, longest))
        return replace(self, k=min(self.k, longest), fixed=fixed)


@dataclass
class Score:
    """What a replay generated, and the time that it took."""

    tokens: int = 0
    seconds: float = 0.0
    """The expected seconds; noise reaches the controller, but not the score."""
    decode_steps: int = 0

    @property
    def rate(self) -> float:
        """The tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Running:
    """A response in progress."""

    response: RecordedResponse
    fates: Sequence[int]
    """For each token of the response, how many tokens of the drafter's draft after it would be accepted."""
    told: Sequence[Sequence[float]]
    """For each token of the response, the drafter's confidence in each token of that draft."""
    cursors: Mapping[str, TextCursor] = field(default_factory=dict)
    count: int = 0
    """The number of its tokens so far."""
    kind: Kind = NO_TEXT
    """The kind of the draft that is verified next."""
    drafted: int = 0
    """The number of tokens of that draft."""
    accepted: int = 0
    """The number of these that will be accepted."""
    confidences: tuple[float, ...] = ()
    """The drafter's confidence in each of these."""


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
        """Run all generations of the workload and return the score."""
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
        waiting = [Running(response, *_drafts(response, drafter)) for response in reversed(responses)]
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
            k = self._draft(running, lengths)
            seconds = self.machine.seconds(len(running), drafted + prompts, k)
            self.score.seconds += seconds
            self.score.decode_steps += 1
            if follows and not prompts:
                measured = seconds * self.pauses.factor()
                drafting = measured * self.machine.drafting_seconds(len(running), k) / seconds
                self.controller.observe_parts(len(running), lengths, drafted, drafting, measured - drafting)
                self.controller.observe(len(running), verified, measured if verified == lengths else None, outcomes)
            verified, follows = lengths, True
            for item in running:
                if item.count == len(item.response.tokens):
                    self.texts.remember(item.response.tokens)
            running = [item for item in running if item.count < len(item.response.tokens)]

    def _verify(self, running: Sequence[Running]) -> list[DraftOutcome]:
        """Give every request its accepted draft tokens and one more; learn from the outcomes and return them."""
        outcomes = []
        for item in running:
            tokens = item.response.tokens
            if item.count == 0:
                prompt = self.recording.prompts[item.response.prompt]
                item.cursors = self.texts.cursors(prompt, item.response.seed)
            elif item.drafted:
                source, agreement = item.kind
                outcomes.append(DraftOutcome(source, item.drafted, item.accepted, agreement, item.confidences))
            end = min(item.count + item.accepted + 1, len(tokens))
            for cursor in item.cursors.values():
                cursor.advance(tokens[item.count : end])
            self.score.tokens += end - item.count
            item.count = end
        self.texts.acceptance.observe(outcomes)
        return outcomes

    def _draft(self, running: Sequence[Running], lengths: DraftLengths) -> int:
        """Give every request its next draft; return the tokens that the drafter drafts for each, 0 if it need not."""
        drafts = [self.texts.draft(item.cursors, lengths) for item in running]
        k = 0 if all(text for _, text in drafts) else lengths.k
        chances = []
        for item, (kind, text) in zip(running, drafts, strict=True):
            room = max(0, self._longest - item.count - 1)
            item.kind = kind if text else NO_TEXT
            item.drafted = min(len(text) if text else k, room)
            item.confidences = () if text else tuple(item.told[item.count - 1][: item.drafted])
            chances.append(self._chances(item))
        budgets = self.controller.budgets(lengths, as_matrix(chances))
        for item, (_, text), budget in zip(running, drafts, budgets, strict=True):
            rest = item.response.tokens[item.count :]
            item.drafted = min(item.drafted, budget)
            item.confidences = item.confidences[: item.drafted]
            if text:
                item.accepted = accepted_prefix(text[: item.drafted], rest)
            else:
                item.accepted = min(item.drafted, item.fates[item.count - 1], len(rest))
        return k

    def _chances(self, item: Running) -> list[float]:
        """Return for each token of a request's draft the probability that it and all before it are accepted."""
        if item.kind != NO_TEXT:
            return self.texts.acceptance.chances(item.kind, item.drafted)
        calibration = self.controller.calibration
        if not item.confidences:
            return list(calibration.unconfident()[: item.drafted])
        return list(calibration.chances(np.array([item.confidences]))[0])


def _drafts(response: RecordedResponse, drafter: DrafterState) -> tuple[Sequence[int], Sequence[Sequence[float]]]:
    """Return the fates of a drafter's drafts, and its confidence in them; a useless one is as sure as the real one."""
    if drafter == "before":
        return response.accepted_before, response.confidences_before or [[]] * len(response.tokens)
    told = response.confidences or [[]] * len(response.tokens)
    return [0] * len(response.tokens) if drafter == "useless" else response.accepted, told
