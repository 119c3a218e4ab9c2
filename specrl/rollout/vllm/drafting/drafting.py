"""Drafting inside the engine: how far to draft, and which request gets a draft from text or from the drafter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrl.config import Config
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.confidence import as_matrix
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.drafts.estimates import NO_DRAFTS, DraftLengths
from specrl.rollout.drafts.text_acceptance import NO_TEXT, Kind
from specrl.rollout.drafts.text_drafts import TextDrafts
from specrl.rollout.drafts.text_sources import StoredTextSource, text_sources
from specrl.rollout.sampling.inverse_cdf import most_likely
from specrl.rollout.vllm.drafting.deferred_prefill import DeferredPrefill
from specrl.rollout.vllm.engine.lifecycle import draft_model
from specrl.rollout.vllm.group import agreed
from specrl.rollout.vllm.sampler import InvariantSampler, RequestRecord, request_seed


class NoDrafter:
    """The `custom_class` that vLLM gets for methods without a drafter: `Drafting` makes all proposals."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *_: object) -> None: ...

    def propose(self, sampled_token_ids: Sequence[Any], *_: object, **__: object) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class Drafting:
    """Replaces the runner's `propose_draft_token_ids`, and calls the original for what vLLM's proposer drafts.

    In one batch, a request that agrees with some text gets a draft from that text, and any other what the proposer
    drafts; vLLM verifies drafts of different lengths, zero included. A model-based drafter must read every token of
    every request, now or later (`DeferredPrefill`), so that its KV cache has no holes; the passes that lengthen drafts
    are left out when no request needs them. The controller learns from the time between one proposal and the next.
    """

    def __init__(
        self,
        runner: Any,
        sampler: InvariantSampler,
        config: Config,
        controller: Controller,
        settings: ControlSettings,
        greedy: GreedyDrafts | None,
    ) -> None:
        self.runner = runner
        self.greedy = greedy
        """What picks the drafter's tokens, which tells its confidence in them; None if no model drafts."""
        self.sampler = sampler
        self.method = config.speculation.draft_method
        self.controller = controller
        self.texts = TextDrafts(text_sources(config.speculation, settings), settings)
        self._new_sources = partial(text_sources, config.speculation, settings)
        self.deferred_prefill = DeferredPrefill(runner) if self.method.has_weights else None
        """Lets a drafter that reads the policy's features do so later, while no drafts are wanted."""
        self.fixed: DraftLengths | None = None
        """The draft lengths to use instead of the controller's choice; None leaves the choice to the controller."""
        self._learns = True
        """Whether the generation that is under way teaches the controller and the text sources anything."""
        self._is_paused = False
        self._lengths = NO_DRAFTS
        self._last_end: float | None = None
        self._drafter_proposals = runner.propose_draft_token_ids

    def install(self) -> None:
        """Take the place of the runner's method."""
        self.runner.propose_draft_token_ids = self

    def begin(self, recall: bool, learn: bool) -> None:
        """Take note that a generation begins, so that the time since the last one counts for no iteration.

        The arguments are those of `Engine.generate`.
        """
        self._last_end = None
        self._learns = learn
        self.texts.begin(recall)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Draft nothing inside the block, and let the drafter read nothing: its requests end with their first token."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def remember(self, response: Sequence[int]) -> None:
        """Show the text sources a response of this generation, finished or stopped."""
        self.texts.remember(response)

    def replace_remembered(self, generations: Sequence[Sequence[Sequence[int]]]) -> None:
        """Let the text sources remember the responses of these generations and no others; stored text stays."""
        new = zip(self.texts.sources, self._new_sources(), strict=True)
        self.texts.sources = [old if isinstance(old, StoredTextSource) else source for old, source in new]
        for responses in generations:
            self.texts.begin(recall=True)
            for response in responses:
                self.texts.remember(response)

    @property
    def stored(self) -> StoredTextSource | None:
        """The source that replays stored responses; None if the method has none."""
        return next((text for text in self.texts.sources if isinstance(text, StoredTextSource)), None)

    def __call__(self, scheduler_output: Any, *arguments: Any) -> list[list[int]]:
        """Return the next drafts of all requests in the order of the runner's batch, as the runner's method does."""
        iteration = self.sampler.last
        if self._is_paused:
            return [[] for _ in iteration.ids]
        batch = len(iteration.ids)
        verified = self._lengths
        if self._learns:
            self.texts.acceptance.observe(iteration.outcomes)
        self._lengths = self._choose(batch)
        started = time.perf_counter()
        drafts, made = self._propose(self._lengths, scheduler_output, arguments)
        now, drafting = agreed(time.perf_counter(), time.perf_counter() - started)
        if self.fixed is None and self._learns and self._last_end is not None and iteration.all_decoding:
            seconds = now - self._last_end
            drafted = sum(outcome.drafted for outcome in iteration.outcomes)
            tokens = batch + sum(outcome.accepted for outcome in iteration.outcomes)
            self.controller.spend(batch, verified, tokens, seconds)
            self.controller.observe_parts(batch, made, drafted, drafting, seconds - drafting)
            self.controller.observe(batch, verified, seconds if verified == self._lengths else None, iteration.outcomes)
        self._last_end = now
        return drafts

    def _choose(self, batch: int) -> DraftLengths:
        if self.fixed is not None:
            return self.fixed
        return self.controller.choose(batch) if self._learns else self.controller.settled(batch)

    def _propose(
        self, lengths: DraftLengths, scheduler_output: Any, arguments: tuple[Any, ...]
    ) -> tuple[list[list[int]], DraftLengths]:
        """Return the drafts, and the lengths with which they were made: the drafter may not have been needed."""
        iteration = self.sampler.last
        records = [self.sampler.records[request_id] for request_id in iteration.ids]
        entries = zip(iteration.ids, records, iteration.rows, strict=True)
        texts = [self._text(*entry, lengths) for entry in entries]
        if all(text or not row for (_, text), row in zip(texts, iteration.rows, strict=True)):
            lengths = lengths._replace(k=0)
        own = self._from_drafter(lengths.k, scheduler_output, arguments)
        drafts: list[list[int]] = []
        for record, (kind, text), proposal in zip(records, texts, own, strict=True):
            record.draft = kind if text else NO_TEXT
            # A draft must end before the last token of the response, which verification itself adds.
            drafts.append((text or proposal)[: max(0, record.max_tokens - len(record.logprobs) - 1)])
        return drafts if self.fixed is not None else self._within_budgets(lengths, records, drafts), lengths

    def _within_budgets(
        self, lengths: DraftLengths, records: list[RequestRecord], drafts: list[list[int]]
    ) -> list[list[int]]:
        """Return the beginnings of the drafts that are worth verifying, and note the drafter's confidence in them.

        The ranks of one engine must cut alike, though what they expect of a draft may differ in the last bit.
        """
        confidences = self.greedy.take() if self.greedy is not None else None
        if not any(drafts):
            return drafts
        unconfident = self.controller.calibration.unconfident()
        of_drafter = self.controller.calibration.chances(confidences) if confidences is not None else None
        chances = []
        for index, (record, draft) in enumerate(zip(records, drafts, strict=True)):
            if record.draft != NO_TEXT:
                chances.append(self.texts.acceptance.chances(record.draft, len(draft)))
            else:
                row = unconfident if of_drafter is None else of_drafter[index]
                chances.append(row[: len(draft)].tolist())
            told = confidences[index].tolist() if confidences is not None and record.draft == NO_TEXT else []
            record.confidences = tuple(told)
        budgets = agreed(*self.controller.budgets(lengths, as_matrix(chances)))
        return [draft[: int(budget)] for draft, budget in zip(drafts, budgets, strict=True)]

    def _text(
        self, request_id: str, record: RequestRecord, row: list[int], lengths: DraftLengths
    ) -> tuple[Kind, list[int]]:
        """Return a draft from the text that is likeliest to be right; the cursors of all sources move on."""
        if not row:
            return NO_TEXT, []
        if len(record.logprobs) == len(row):  # these are its first tokens
            state = self.runner.requests[request_id]
            record.cursors = self.texts.cursors(state.prompt_token_ids, request_seed(state.sampling_params))
        for cursor in record.cursors.values():
            cursor.advance(row)
        return self.texts.draft(record.cursors, lengths)

    def _from_drafter(self, k: int, scheduler_output: Any, arguments: tuple[Any, ...]) -> list[list[int]]:
        if k == 0 and not self.method.reads_every_token:
            return [[] for _ in self.sampler.last.ids]
        records = [self.sampler.records[request_id] for request_id in self.sampler.last.ids]
        if self.deferred_prefill is not None:
            rows = self.sampler.last.rows
            if k == 0 and self.sampler.last.all_decoding:
                self.deferred_prefill.defer(records, rows, arguments)
                return [[] for _ in rows]
            self.deferred_prefill.forget_what_was_recomputed(records, rows)
            self.deferred_prefill.catch_up(records, arguments)
        if self.greedy is not None:
            self.greedy.take()  # of drafts that were not asked for, such as those of a fixed length
        scheduler_output.num_spec_tokens_to_schedule = k
        proposals = self._drafter_proposals(scheduler_output, *arguments)
        return proposals.tolist() if isinstance(proposals, torch.Tensor) else proposals


class GreedyDrafts:
    """Picks the likeliest token of the runner's drafter, in its own vocabulary, and keeps its probability.

    vLLM copies the logits of a drafter with a smaller vocabulary into rows over the policy's whole vocabulary in every
    pass, and looks for the largest there. With 2,048 and 49,152 tokens, in BF16 on two cores, that took 1.4 ms for one
    row and 23 ms for 32; in the drafter's vocabulary it took less than 1 ms. The token is the same, because both
    vocabularies ascend and ties go to the lowest id.
    """

    def __init__(self, drafter: Any, proposer: Any) -> None:
        self._drafter = drafter
        self._proposer = proposer
        self._confidences: list[Tensor] = []
        """The probabilities of the tokens of each pass, [requests, positions]."""

    @classmethod
    def install(cls, runner: Any) -> GreedyDrafts | None:
        """Take the place of the proposer's own choice of tokens; return None if no model drafts."""
        drafter: Any = draft_model(runner)
        if drafter is None or not hasattr(runner.drafter, "_greedy_sample"):
            return None
        greedy = cls(drafter, runner.drafter)
        runner.drafter._greedy_sample = greedy
        return greedy

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the policy's token ids, int64 [n], for the drafter's outputs [n, hidden size].

        A pass has one position of each request, or in parallel drafting all of them, one request after another.
        """
        offsets: Tensor | None = getattr(self._drafter, "draft_id_to_target_id", None)
        if offsets is None:
            logits = self._drafter.compute_logits(hidden)
        else:
            logits = self._drafter.logits_processor(self._drafter.lm_head, hidden)
        drafted = most_likely(logits)
        wide = logits.float()
        confidences = (wide.gather(1, drafted[:, None])[:, 0] - wide.logsumexp(-1)).exp()
        positions = self._proposer.num_speculative_tokens if self._proposer.parallel_drafting else 1
        self._confidences.append(confidences.view(-1, positions))
        return drafted if offsets is None else drafted + offsets[drafted]

    def take(self) -> NDArray[np.float64] | None:
        """Return the probabilities of the tokens picked since the last call, [requests, positions], if any were."""
        found, self._confidences = self._confidences, []
        return torch.cat(found, dim=1).double().cpu().numpy() if found else None
