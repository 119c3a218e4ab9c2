"""Requests running in vLLM, and the outputs that it has returned for them."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import isnan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrl.rollout.drafts.acceptance import OWN_TEXT, VerifiedDraft
from specrl.rollout.drafts.text_index import SOURCES
from specrl.rollout.errors import NonFiniteLogitsError
from specrl.rollout.stop_strings import StopStrings

DRAFT_BASE = 4096
"""A draft is returned as the index of its source times this, plus the number of its tokens."""


class Columns(NamedTuple):
    """The values returned with each token, as if they were the log-probs of several tokens."""

    logprob: Any
    """NaN if the logits are not finite."""
    log_kept_mass: Any
    """The log of the mass kept by top-k and top-p."""
    draft: Any
    """At a request's first token in an iteration: the verified draft, encoded with `DRAFT_BASE`."""


NUM_COLUMNS = len(Columns._fields)


class PromptColumns(NamedTuple):
    """The values returned with each prompt token but the first, as if they were the log-probs of several tokens."""

    logprob: Any
    """At temperature 1."""
    picked_logprob: Any
    picked_log_kept_mass: Any


NUM_PROMPT_COLUMNS = len(PromptColumns._fields)


@dataclass(eq=False)
class RunningRequest:
    """The outputs that vLLM has returned for one request so far."""

    prompt_length: int
    stops: StopStrings | None = None
    """The strings that end it, which are unknown to vLLM."""
    name: str = ""
    """vLLM's own name for it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """The log-probs of the tokens, under the distribution from which they were sampled."""
    log_kept_mass: list[float] = field(default_factory=list)
    """The log of the probability mass kept by top-k and top-p at each of them; see `Picked`."""
    drafts: list[VerifiedDraft] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    """The log-probs of all prompt tokens but the first, in nats; empty unless requested."""
    prompt_picks: list[tuple[int, float, float]] = field(default_factory=list)
    """What would be sampled in the place of each of the last prompt tokens, those that no cached prefix held, with its
    log-prob and `log_kept_mass`; empty unless it was asked for."""
    decodes: bool = False
    """Whether vLLM has returned a token for it."""
    finish_reason: str | None = None
    started_at: float = 0.0
    """When its first token arrived, in Unix seconds."""
    finished_at: float = 0.0
    """When its last token arrived, in Unix seconds."""
    _routes: list[NDArray[Any]] = field(default_factory=list)

    def take(self, output: Any) -> None:
        """Add one of vLLM's `EngineCoreOutput`s.

        Raises:
            NonFiniteLogitsError: A token was picked or scored by logits that are not finite.
        """
        self.decodes, self.finished_at = True, time.time()
        self.started_at = self.started_at or self.finished_at
        context = self.prompt_length + len(self.tokens)
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            columns = Columns(*output.new_logprobs.logprobs.T.tolist())
            self._refuse_nan(columns.logprob, context)
            self.logprobs += columns.logprob
            self.log_kept_mass += columns.log_kept_mass
            source, drafted = divmod(int(columns.draft[0]), DRAFT_BASE)
            if drafted:
                accepted = min(len(output.new_token_ids) - 1, drafted)  # padding is not part of a draft, even if right
                self.drafts.append(VerifiedDraft(context, drafted, accepted, SOURCES[source]))
        if (scored := output.new_prompt_logprobs_tensors) is not None:
            self.prompt_logprobs = scored.logprobs[:, 0].tolist()
            self._refuse_nan(self.prompt_logprobs, 1)
            if scored.logprobs.shape[1] == NUM_PROMPT_COLUMNS:
                of_prompt = PromptColumns(*scored.logprobs.T.tolist())
                tokens = scored.logprob_token_ids[:, 1].tolist()
                picked = tokens, of_prompt.picked_logprob, of_prompt.picked_log_kept_mass
                self.prompt_picks = list(zip(*picked, strict=True))
        if output.routed_experts is not None:
            self._routes.append(output.routed_experts)
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
        if self.stops is not None:
            self._stop(self.stops, context - self.prompt_length)

    def follow(
        self, text: Sequence[int], size: int, read: RunningRequest, stop_tokens: Container[int], limit: int
    ) -> bool:
        """Add the tokens sampled in place of the first `size` tokens of a text and after them.

        The tokens so far must be the beginning of the text.

        Args:
            read: The request with these tokens of the text at the end of its prompt.
            limit: The maximum number of tokens in the response.

        Returns:
            Whether the response still agrees with the text, and neither has ended.
        """
        before = len(self.tokens)
        picks = [*read.prompt_picks[before - size :], (read.tokens[0], read.logprobs[0], read.log_kept_mass[0])]
        assert len(picks) == size - before + 1, "a cached prefix held tokens that were to be compared"
        drafted = text[before:size]
        agreed = (pick[0] == token and token not in stop_tokens for pick, token in zip(picks, drafted, strict=False))
        taken = picks[: min(1 + sum(takewhile(bool, agreed)), limit - before)]
        self.tokens += [token for token, _, _ in taken]
        self.logprobs += [logprob for _, logprob, _ in taken]
        self.log_kept_mass += [mass for _, _, mass in taken]
        self.drafts.append(VerifiedDraft(self.prompt_length + before, size - before, len(taken) - 1, OWN_TEXT))
        self.started_at, self.finished_at = self.started_at or read.started_at, read.finished_at
        self._routes = read._routes
        if self.tokens[-1] in stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == limit:
            self.finish_reason = "length"
        if self.stops is not None:
            self._stop(self.stops, before)
        now = len(self.tokens)
        return self.finish_reason is None and now < len(text) and self.tokens == list(text[:now])

    def _refuse_nan(self, logprobs: list[float], first: int) -> None:
        if isnan(sum(logprobs)):
            at = first + next(i for i, logprob in enumerate(logprobs) if isnan(logprob))
            raise NonFiniteLogitsError(
                f"the policy's logits for token {at} of request {self.name} are not finite: are its weights?"
            )

    def _stop(self, stops: StopStrings, before: int) -> None:
        if (length := stops.length(self.tokens, before)) is None:
            return
        del self.tokens[length:], self.logprobs[length:], self.log_kept_mass[length:]
        if self.drafts and self.drafts[-1].context == self.prompt_length + before:
            draft = self.drafts.pop()
            self.drafts.append(draft._replace(accepted=min(draft.accepted, length - before - 1)))  # as at a stop token
        self.finish_reason = "stop"

    def forget_routes(self) -> None:
        """Drop the experts of its tokens, because vLLM will return all of them again."""
        self._routes = []

    def routes(self, num_tokens: int) -> NDArray[Any] | None:
        """The experts of the first tokens, [num_tokens, layers, experts per token]; None if none were kept."""
        return np.concatenate(self._routes)[:num_tokens] if self._routes else None
