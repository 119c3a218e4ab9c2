"""The section `sampler` of `specrl bench gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specrl.bench.gpu.models import Row, Scale, microseconds
from specrl.rollout.drafts.device_drafts import Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.text_index import ANY_PROMPT, END, NOTHING, Text, TextIndex
from specrl.rollout.sampling.gumbel import pick
from specrl.rollout.sampling.verification import Sampling, verify

K = 3
PROMPT_TOKENS = 8  # tokens before the text that a request follows
LONGEST, PASSES = 15, 3  # the longest draft, and the drafter's part of it
NEW = 3  # tokens per iteration: every request accepts two drafts
ITERATIONS = 3
SETTINGS = (  # type of the logits, top-k and top-p
    ("pick", torch.bfloat16, 0, 1.0),
    ("pick, float32", torch.float32, 0, 1.0),
    ("pick, top-p 0.95", torch.bfloat16, 0, 0.95),
    ("pick, top-k 50", torch.bfloat16, 50, 1.0),
)


class Implementation(NamedTuple):
    name: str
    sampling: Sampling
    drafts: type[DeviceDrafts]


PYTORCH = Implementation("PyTorch", Sampling(pick, verify), DeviceDrafts)


class Case(NamedTuple):
    what: str
    rows: int
    found: Iterable[Tensor]
    work: Callable[[], object]  # the one that is timed


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare the kernels that pick tokens, verify drafts and draft from text with PyTorch, and time both.

    Values that differ from PyTorch's (for picked tokens, PyTorch on a CPU) count as unexplained; there must be none.
    Log-probs may differ by 1e-6, absolute and relative. Calls are timed back to back, including host time.
    """
    del folder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from compare(kernels() if device.type == "cuda" else PYTORCH, scale, device)


def kernels() -> Implementation:
    """The Triton kernels, on a GPU or in Triton's interpreter."""
    from specrl.rollout.drafts.kernels import TritonDrafts
    from specrl.rollout.sampling import kernels

    return Implementation("Triton", Sampling(kernels.pick, kernels.verify), TritonDrafts)


def compare(own: Implementation, scale: Scale, device: torch.device) -> Iterator[Row]:
    """Yield the rows that compare an implementation with PyTorch."""
    for rows in scale.rows:
        references = _cases(PYTORCH, rows, scale, device, pick_on=torch.device("cpu"))
        for case, reference in zip(_cases(own, rows, scale, device, pick_on=device), references, strict=True):
            unexplained = sum(map(_different, case.found, reference.found))
            row: Row = {"of": own.name, "what": case.what, "rows": case.rows, "unexplained": unexplained}
            row["us"] = microseconds(case.work, scale)
            yield row | {"pytorch_us": microseconds(reference.work, scale)}


def _cases(of: Implementation, rows: int, scale: Scale, device: torch.device, pick_on: torch.device) -> Iterator[Case]:
    vocab_size = scale.served.vocab_size
    yield from _picking(of.sampling, rows, vocab_size, device, pick_on)
    yield _verifying(of.sampling, rows, vocab_size, device)
    yield from _drafting(of.drafts, rows, scale.length, vocab_size, device)


def _picking(of: Sampling, rows: int, vocab_size: int, device: torch.device, pick_on: torch.device) -> Iterator[Case]:
    noise = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows)) * 4
    for name, dtype, top_k, top_p in SETTINGS:
        settings = torch.ones(rows), torch.full((rows,), top_k), torch.full((rows,), top_p)
        given = noise.to(dtype), *settings, torch.arange(rows), torch.full((rows,), 7)
        found = of.pick(*(values.to(pick_on) for values in given))
        yield Case(name, rows, found, partial(of.pick, *(values.to(device) for values in given)))


def _verifying(of: Sampling, rows: int, vocab_size: int, device: torch.device) -> Case:
    generator, width = torch.Generator().manual_seed(rows), K + 1
    requests = max(rows // width, 1)
    picked = torch.randint(vocab_size, (requests * width,), generator=generator)
    is_right = torch.rand(len(picked), generator=generator) < 0.7
    drafts = torch.where(is_right, picked, (picked + 1) % vocab_size).roll(1)  # after the token that it follows
    stops = picked[:1]  # the first request ends at its first token
    starts, limits = torch.arange(requests + 1) * width, torch.randint(1, 9, (requests,), generator=generator)
    tensors = picked, drafts, starts.int(), stops, limits.int()
    given: list[Any] = [*(values.to(device) for values in tensors), width]
    return Case("verify", len(picked), of.verify(*given), partial(of.verify, *given))


def _drafting(of: type[DeviceDrafts], rows: int, length: int, vocab_size: int, device: torch.device) -> Iterator[Case]:
    """Draft from a synthetic text of `length` tokens for each request; return all drafts, and which are kept.

    Every second request follows text of its prompt, the others text of any prompt. The timed part compares and
    chooses the last drafts again.
    """
    random = np.random.default_rng(rows)
    texts = random.integers(3, vocab_size, (rows, length), dtype=np.int32)
    drafter = random.integers(3, vocab_size, (rows, PASSES))
    drafter[::2, 1:] = END  # where confidence was low
    index = TextIndex([Text(text, ANY_PROMPT if row % 2 else row) for row, text in enumerate(texts)], device)
    facts = torch.tensor([(row, row + 1, PROMPT_TOKENS + length, PROMPT_TOKENS) for row in range(rows)])
    tokens = torch.from_numpy(np.pad(texts, ((0, 0), (PROMPT_TOKENS, 0)))).to(device)
    lengths = torch.full((rows,), PROMPT_TOKENS + length // 2, dtype=torch.int32, device=device)
    *iterations, last = [
        Requests(facts.to(device), lengths + NEW * iteration, tokens) for iteration in range(ITERATIONS + 1)
    ]
    slots = torch.from_numpy(random.permutation(rows)).int().to(device)
    batch, drafted = Batch(slots, torch.full_like(slots, NEW)), torch.from_numpy(drafter).to(device)

    made = of(rows, LONGEST, device)
    made.index, made.has_drafter = index, True
    made.begin([2])
    made.expect(np.random.default_rng(0).random((LONGEST + 1, NOTHING)), recalls=True)
    chosen = []
    for requests in iterations:
        made.observe(requests, batch)
        chosen.append(made.choose(requests, batch, drafted, LONGEST))
    kept = made.made_at, made.tokens, made.kinds, made.sources, made.lengths, made.by_kind, made.offered
    found = [*chosen, *(values.clone() for values in kept)]
    yield Case("compare text", rows, found, partial(made.observe, last, batch))
    yield Case("draft from text", rows, found, partial(made.choose, iterations[-1], batch, drafted, LONGEST))


def _different(found: Tensor, expected: Tensor) -> int:
    expected = expected.to(found.device)
    if found.is_floating_point():
        return int((~torch.isclose(found, expected, 1e-6, 1e-6, equal_nan=True)).sum())
    return int((found != expected).sum())
