"""Text of a request's own seed, verified before decoding in the way a prompt is read: many tokens in one pass.

The noise of each position is known, so one pass over such a text yields what the policy samples in place of each of its
tokens. The response begins with the tokens that agree, and the policy's token at the first difference. Each pass reads
at most as much as all passes before it, while the prefix cache keeps their tokens, so that little of a text that soon
differs is read in vain. No request decodes before all have read their texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specrl.rollout.vllm.engine.arguments import reading_params
from specrl.rollout.vllm.engine.lifecycle import VllmEngine
from specrl.rollout.vllm.engine.running import RunningRequest

FIRST = 64
"""The number of a text's tokens in the first pass."""
Tokens = list[int]


def read_ahead(
    engine: VllmEngine,
    prompts: Sequence[Tokens],
    params: Sequence[Any],
    texts: Mapping[int, Tokens],
    begun: Sequence[RunningRequest],
    stop_tokens: Sequence[int],
) -> None:
    """Begin responses with the texts of their own seeds, as far as the policy samples the same tokens.

    Args:
        params: vLLM's `SamplingParams` of each request.
        texts: The texts by request index; `begun` holds the requests themselves, still without a token.
    """
    stops, size = frozenset(stop_tokens), FIRST
    # The last token of a response is sampled after the others, so it need not be read.
    texts = {at: text for at, whole in texts.items() if (text := whole[: params[at].max_tokens - 1])}
    while texts:
        parts = {at: text[:size] for at, text in texts.items()}
        read = _read(engine, {at: (prompts[at] + part, params[at]) for at, part in parts.items()}, cached=True)
        # Responses may begin alike: a cached prefix of another one then holds tokens that are yet to be compared.
        missed = [at for at, part in parts.items() if len(read[at].prompt_picks) < len(part) - len(begun[at].tokens)]
        read |= _read(engine, {at: (prompts[at] + parts[at], params[at]) for at in missed}, cached=False)
        texts = {
            at: text
            for at, text in texts.items()
            if begun[at].follow(text, len(parts[at]), read[at], stops, params[at].max_tokens)
        }
        size *= 2


def _read(
    engine: VllmEngine, sequences: Mapping[int, tuple[Tokens, Any]], *, cached: bool
) -> dict[int, RunningRequest]:
    read = {at: engine.add(tokens, reading_params(own, cached=cached)) for at, (tokens, own) in sequences.items()}
    left = len(read)
    while left:
        left -= len(engine.step())
        engine.decode_steps += engine.last is not None
    return read
