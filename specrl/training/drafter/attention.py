"""Attention in the drafter's training: packed rows, and chains that see a context and keys of their own.

No scores are materialised: the backward pass of flash attention needs only a query's output and log-sum-exp, and is
exact for a part of the keys if given those over all keys. So a kernel computes the context, in which the chains of a
response are consecutive queries under a causal mask, and a chain's few own keys are merged in by their log-sum-exp.

For n queries of d channels in h heads that see m keys and c of their own, a step takes 4 n m d h FLOPs forward (half
of that if m = n, by the mask), 2.5 times as many backward, and 14 n c d h for the own keys, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401  (registers the operations of `_Flash`)

MAX_SCORES = 1 << 26
"""The number of scores that exist at once without a kernel."""


@dataclass(frozen=True)
class Spans:
    """Rows of consecutive queries and keys, in host memory.

    The last query of a row sees all of its keys, the query before it all but the last key, and so on.
    """

    queries: tuple[int, ...]
    """[rows + 1]: where each row's queries begin, and the total number."""
    keys: tuple[int, ...]
    """[rows + 1]: the same for the keys; a row has at least as many keys as queries."""
    device: torch.device

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        queries, keys = (torch.tensor(each, dtype=torch.int32) for each in (self.queries, self.keys))
        return queries.to(self.device), keys.to(self.device)

    @property
    def longest(self) -> tuple[int, int]:
        queries, keys = (max(stop - start for start, stop in pairwise(each)) for each in (self.queries, self.keys))
        return queries, keys


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    *,
    window: int | None = None,
    own_keys: Sequence[Tensor] = (),
    own_values: Sequence[Tensor] = (),
) -> Tensor:
    """Attend to packed rows, and to each query's own keys: [queries, heads, width].

    Queries are [queries, heads, width], scaled; keys and values [keys, kv_heads, width], of which a query sees the last
    `window`; each own key and value is [queries, kv_heads, width].
    """
    result: Tensor = _Attention.apply(queries, keys, values, spans, window, *own_keys, *own_values)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None, *own: Tensor) -> Tensor:
        kernel = _kernel_for(q)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = kernel.forward(q, k, v, spans, window)
            if own:
                out, lse = _merged(q, out, lse, own)
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.kernel, ctx.spans, ctx.window = kernel, spans, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *own = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = ctx.kernel.backward(grad, q, k, v, out, lse, ctx.spans, ctx.window)
        if own:
            more, own_grads = _own_gradients(grad, q, out, lse, own)
            return (grad_q + more).to(q.dtype), grad_k, grad_v, None, None, *own_grads
        return grad_q, grad_k, grad_v, None, None


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[n, heads, ...] as [n, kv_heads, heads of a key, ...], in float32."""
    return x.float().reshape(len(x), kv_heads, -1, *x.shape[2:])


def _stacked(own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Own keys and values, float32 [n, kv_heads, own keys, width] each."""
    half = len(own) // 2
    return torch.stack([*own[:half]], 2).float(), torch.stack([*own[half:]], 2).float()


def _merged(q: Tensor, out: Tensor, lse: Tensor, own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    keys, values = _stacked(own)
    scores = _grouped(q, keys.shape[1]) @ keys.mT  # [n, kv_heads, heads of a key, own keys]
    context = _grouped(lse.t(), keys.shape[1])
    total = torch.cat([context[..., None], scores], -1).logsumexp(-1)
    weights = (scores - total[..., None]).exp_()
    result = torch.addcmul(weights @ values, _grouped(out, keys.shape[1]), (context - total).exp_()[..., None])
    return result.flatten(1, 2).to(q.dtype), total.flatten(1).t().contiguous()


def _own_gradients(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, own: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    keys, values = _stacked(own)
    d_out, query = _grouped(grad, keys.shape[1]), _grouped(q, keys.shape[1])
    weights = (query @ keys.mT - _grouped(lse.t(), keys.shape[1])[..., None]).exp_()
    mean = (d_out * _grouped(out, keys.shape[1])).sum(-1, keepdim=True)
    grad_scores = (d_out @ values.mT - mean).mul_(weights)
    both = *(grad_scores.mT @ query).unbind(2), *(weights.mT @ d_out).unbind(2)
    return (grad_scores @ keys).flatten(1, 2), [part.to(like.dtype) for part, like in zip(both, own, strict=True)]


class _Flash:
    """Flash attention for rows of several lengths (`torch.nn.attention.varlen`), on GPUs in 16 bits.

    Its causal mask is aligned at the last query and the last key of a row, as `Spans` is.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> tuple[Tensor, Tensor]:
        out, lse, _ = torch.ops.torch_attn._varlen_attn(
            *(q, k, v, *spans.ends, *spans.longest), window is None, 1.0, _sides(window)
        )
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Spans, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
            *(grad, q, k, v, out, lse, *spans.ends, *spans.longest), window is None, no_dropout, 1.0, _sides(window)
        )
        return grads


def _sides(window: int | None) -> list[int]:
    return [-1 if window is None else window - 1, 0]


class _Chunk(NamedTuple):
    queries: slice
    keys: slice
    hidden: Tensor


class _Plain:
    """The same in PyTorch, with at most `MAX_SCORES` scores at a time, and scores and sums in float32."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        for chunk in _chunks(spans, q.shape[1], window):
            scores = _scores(q, k, chunk)  # [kv_heads, heads of a key, queries, keys]
            total = scores.logsumexp(-1)
            lse[:, chunk.queries] = total.flatten(0, 1)
            weights = scores.sub_(total[..., None]).exp_().to(v.dtype)
            found = torch.einsum("kgqs,skd->qkgd", weights, v[chunk.keys])
            out[chunk.queries] = found.flatten(1, 2)
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Spans, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k.shape[1]
        grad_q, grad_k, grad_v = torch.empty_like(q), *(torch.zeros_like(each, dtype=torch.float32) for each in (k, v))
        for chunk in _chunks(spans, q.shape[1], window):
            own = chunk.queries
            query, d_out = _grouped(q[own], kv_heads), _grouped(grad[own], kv_heads)
            mean = (d_out * _grouped(out[own], kv_heads)).sum(-1).permute(1, 2, 0)
            total = lse[:, own].reshape(kv_heads, q.shape[1] // kv_heads, -1)
            weights = _scores(q, k, chunk).sub_(total[..., None]).exp_()
            grad_v[chunk.keys] += torch.einsum("kgqs,qkgd->skd", weights, d_out)
            grad_weights = torch.einsum("qkgd,skd->kgqs", d_out, v[chunk.keys].float())
            grad_scores = grad_weights.sub_(mean[..., None]).mul_(weights)
            grad_q[own] = torch.einsum("kgqs,skd->qkgd", grad_scores, k[chunk.keys].float()).flatten(1, 2).to(q.dtype)
            grad_k[chunk.keys] += torch.einsum("kgqs,qkgd->skd", grad_scores, query)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, chunk: _Chunk) -> Tensor:
    query = q[chunk.queries]
    query = query.reshape(len(query), k.shape[1], -1, q.shape[2])
    return torch.einsum("qkgd,skd->kgqs", query, k[chunk.keys]).float().masked_fill_(chunk.hidden, float("-inf"))


def _chunks(spans: Spans, heads: int, window: int | None) -> Iterator[_Chunk]:
    for (start, stop), (first, end) in zip(pairwise(spans.queries), pairwise(spans.keys), strict=True):
        most = max(1, MAX_SCORES // (heads * (end - first)))
        for begin in range(start, stop, most):
            last = min(begin + most, stop)
            behind = end - stop  # the index of the last key that a query sees, minus the query's
            lowest = first if window is None else max(first, begin + behind - window + 1)
            keys = slice(lowest, last + behind)
            sees = torch.arange(begin, last, device=spans.device)[:, None] + behind
            place = torch.arange(keys.start, keys.stop, device=spans.device)
            hidden = place > sees
            yield _Chunk(slice(begin, last), keys, hidden if window is None else hidden | (place <= sees - window))


def _kernel_for(q: Tensor) -> type[_Flash] | type[_Plain]:
    return _Flash if q.is_cuda and q.dtype != torch.float32 else _Plain
