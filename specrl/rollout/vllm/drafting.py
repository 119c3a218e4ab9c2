"""Drafting inside the engine: how far to draft, and which request gets a draft from text or from the drafter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specrl.config import Config
from specrl.config.methods import DraftMethod
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.drafts.estimates import NO_DRAFTS, DraftLengths
from specrl.rollout.drafts.text_acceptance import NO_TEXT, Kind
from specrl.rollout.drafts.text_drafts import TextDrafts
from specrl.rollout.drafts.text_sources import StoredTextSource, text_sources
from specrl.rollout.sampling.inverse_cdf import most_likely
from specrl.rollout.vllm.deferred_prefill import DeferredPrefill
from specrl.rollout.vllm.group import agreed
from specrl.rollout.vllm.lifecycle import draft_model
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
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.method = config.speculation.draft_method
        self.controller = controller
        self.texts = TextDrafts(text_sources(config.speculation, settings), settings)
        self.deferred_prefill = DeferredPrefill(runner) if self.method.has_weights else None
        """Lets a drafter that reads the policy's features do so later, while no drafts are wanted."""
        self.fixed: DraftLengths | None = None
        """The draft lengths to use instead of the controller's choice; None leaves the choice to the controller."""
        self._learns = True
        """Whether the generation that is under way teaches the controller and the text sources anything."""
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

    def remember(self, response: Sequence[int]) -> None:
        """Show the text sources a response of this generation, finished or stopped."""
        self.texts.remember(response)

    @property
    def stored(self) -> StoredTextSource | None:
        """The source that replays stored responses; None if the method has none."""
        return next((text for text in self.texts.sources if isinstance(text, StoredTextSource)), None)

    def __call__(self, scheduler_output: Any, *arguments: Any) -> list[list[int]]:
        """Return the next drafts of all requests in the order of the runner's batch, as the runner's method does."""
        iteration = self.sampler.last
        batch = len(iteration.ids)
        verified = self._lengths
        if self._learns:
            self.texts.acceptance.observe(iteration.outcomes)
        self._lengths = self._choose(batch)
        drafts = self._propose(self._lengths, scheduler_output, arguments)
        (now,) = agreed(time.perf_counter())
        if self.fixed is None and self._learns and self._last_end is not None and iteration.all_decoding:
            seconds = now - self._last_end
            self.controller.observe(batch, verified, seconds if verified == self._lengths else None, iteration.outcomes)
        self._last_end = now
        return drafts

    def _choose(self, batch: int) -> DraftLengths:
        if self.fixed is not None:
            return self.fixed
        return self.controller.choose(batch) if self._learns else self.controller.settled(batch)

    def _propose(self, lengths: DraftLengths, scheduler_output: Any, arguments: tuple[Any, ...]) -> list[list[int]]:
        iteration = self.sampler.last
        records = [self.sampler.records[request_id] for request_id in iteration.ids]
        entries = zip(iteration.ids, records, iteration.rows, strict=True)
        texts = [self._text(*entry, lengths) for entry in entries]
        all_text = all(text or not row for (_, text), row in zip(texts, iteration.rows, strict=True))
        own = self._from_drafter(0 if all_text else lengths.k, scheduler_output, arguments)
        drafts: list[list[int]] = []
        for record, (kind, text), proposal in zip(records, texts, own, strict=True):
            record.draft = kind if text else NO_TEXT
            # A draft must end before the last token of the response, which verification itself adds.
            drafts.append((text or proposal)[: max(0, record.max_tokens - len(record.logprobs) - 1)])
        return drafts

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
        scheduler_output.num_spec_tokens_to_schedule = k
        proposals = self._drafter_proposals(scheduler_output, *arguments)
        return proposals.tolist() if isinstance(proposals, torch.Tensor) else proposals


def pick_drafts_faster(runner: Any) -> None:
    """Make the runner's drafter, if it has one, pick its likeliest token in its own vocabulary.

    vLLM copies the logits of a drafter with a smaller vocabulary into rows over the policy's whole vocabulary in every
    pass, and looks for the largest there. With 2,048 and 49,152 tokens, in BF16 on two cores, that took 1.4 ms for one
    row and 23 ms for 32; in the drafter's vocabulary it took less than 1 ms. The token is the same, because both
    vocabularies ascend and ties go to the lowest id.
    """
    drafter: Any = draft_model(runner)
    if drafter is None or not hasattr(runner.drafter, "_greedy_sample"):
        return

    def most_likely_draft(hidden: Tensor) -> Tensor:
        """Return the policy's token ids, int64 [n], for the drafter's outputs [n, hidden size]."""
        offsets: Tensor | None = getattr(drafter, "draft_id_to_target_id", None)
        if offsets is None:
            return most_likely(drafter.compute_logits(hidden))
        drafted = most_likely(drafter.logits_processor(drafter.lm_head, hidden))
        return drafted + offsets[drafted]

    runner.drafter._greedy_sample = most_likely_draft


def refuse_shared_head(runner: Any, method: DraftMethod) -> None:
    """Raise ValueError if vLLM made the drafter share the policy's head: refitting one would overwrite the other.

    vLLM does so when the two are equal at load time, which needs a draft vocabulary as large as the policy's. The
    policy's own multi-token-prediction layer is meant to share it, and its refit leaves the head alone.
    """
    drafter = draft_model(runner)
    if method.is_policy_layer or drafter is None or not hasattr(drafter, "lm_head"):
        return
    if drafter.lm_head is runner.model.lm_head:
        raise ValueError("the drafter shares the policy's head; give it a draft vocabulary smaller than the policy's")
