"""The section `sampler` of `specrl bench gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specrl.bench.gpu.models import Row, Scale
from specrl.bench.gpu.text_drafts import FollowedTexts
from specrl.rollout.drafts.device_drafts import DeviceDrafts
from specrl.rollout.sampling.inverse_cdf import Picked, pick_at, uniforms
from specrl.rollout.sampling.verification import Sampling, verify

K = 3
STOP_TOKENS = 8
CALLS = 20  # timed together, as a GPU starts on a call while the host prepares the next one
NEAR = 1e-5  # of a token's edge in the CDF: FP32 weights may fall on the other side of it
PART = 64  # rows whose CDF is computed at once


class Implementation(NamedTuple):
    """What picks and verifies, and the class that drafts from text."""

    name: str
    sampling: Sampling
    drafts: type[DeviceDrafts]


PYTORCH = Implementation("PyTorch", Sampling(pick_at, verify), DeviceDrafts)


class Setting(NamedTuple):
    name: str
    dtype: torch.dtype
    top_k: int = 0
    top_p: float = 1.0


SETTINGS = (
    Setting("pick", torch.bfloat16),
    Setting("pick, float32", torch.float32),
    Setting("pick, top-p 0.95", torch.bfloat16, top_p=0.95),
    Setting("pick, top-k 50", torch.bfloat16, top_k=50),
)


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare the kernels that pick tokens, verify drafts and draft from text with the same in PyTorch, and time both.

    Unexplained are values that are not PyTorch's to the bit, and picked tokens that are not those of FP64 where
    rounding cannot have decided; both must be 0. Log-probs may differ in the last bits of a logarithm. Times are of
    calls one behind the other, the host's part included; torch's softmax and multinomial stand beside `pick`.
    """
    del folder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from compare(kernels() if device.type == "cuda" else PYTORCH, scale, device)


def compare(own: Implementation, scale: Scale, device: torch.device) -> Iterator[Row]:
    """Yield the rows of an implementation beside PyTorch."""
    for rows in scale.rows:
        for setting in SETTINGS:
            yield {"of": own.name, **_picking(own, setting, rows, scale, device)}
        yield {"of": own.name, **_verifying(own, rows, scale, device)}
        for row in _drafting(own, rows, scale, device):
            yield {"of": own.name, **row}


def kernels() -> Implementation:
    """Triton's kernels, for a GPU or for Triton's interpreter."""
    from specrl.rollout.drafts.kernels import TritonDrafts
    from specrl.rollout.sampling import kernels

    return Implementation("Triton", Sampling(kernels.pick, kernels.verify), TritonDrafts)


def _picking(own: Implementation, setting: Setting, rows: int, scale: Scale, device: torch.device) -> Row:
    generator = torch.Generator().manual_seed(rows)
    on_cpu = (torch.randn(rows, scale.served.vocab_size, generator=generator) * 4).to(setting.dtype)
    seeds, positions = torch.arange(rows), torch.full((rows,), 7)
    limits = torch.ones(rows), torch.full((rows,), setting.top_k), torch.full((rows,), setting.top_p)
    logits = on_cpu.to(device)
    arguments = logits, *(values.to(device) for values in (*limits, seeds, positions))
    found, expected = own.sampling.pick(*arguments), pick_at(*arguments)
    is_whole = not setting.top_k and setting.top_p == 1
    wrong, near = _against_fp64(found, on_cpu, uniforms(seeds, positions)) if is_whole else (0, None)
    return {
        "what": setting.name,
        "rows": rows,
        "unexplained": different((found.tokens, found.is_finite), (expected.tokens, expected.is_finite)) + wrong,
        "near_ties": near,
        "logprob_difference": float((found.logprobs - expected.logprobs).abs().max()),
        "us": microseconds(lambda: own.sampling.pick(*arguments), scale, device),
        "pytorch_us": microseconds(lambda: pick_at(*arguments), scale, device),
        "multinomial_us": microseconds(lambda: logits.float().softmax(-1).multinomial(1), scale, device),
    }


def _against_fp64(found: Picked, logits: Tensor, u: Tensor) -> tuple[int, int]:
    """How many tokens are not those of an FP64 CDF: far from its edges, and near them."""
    wrong = near = 0
    for part in torch.arange(len(u)).split(PART):
        cumulative, targets = logits[part].double().softmax(-1).cumsum(-1), u[part, None]
        differs = found.tokens.cpu()[part] != torch.searchsorted(cumulative, targets, right=True)[:, 0]
        is_near = (cumulative - targets).abs().min(-1).values <= NEAR
        wrong, near = wrong + int((differs & ~is_near).sum()), near + int((differs & is_near).sum())
    return wrong, near


def _verifying(own: Implementation, rows: int, scale: Scale, device: torch.device) -> Row:
    generator, width = torch.Generator().manual_seed(rows), K + 1
    requests, vocab = max(rows // width, 1), scale.served.vocab_size
    picked = torch.randint(vocab, (requests * width,), generator=generator)
    is_right = torch.rand(len(picked), generator=generator) < 0.7  # the token before decides the next row's draft
    drafts = torch.where(is_right, picked, (picked + 1) % vocab).roll(1)
    stops = torch.full((requests, STOP_TOKENS), -1)
    stops[:, 0] = picked[::width]
    stops[1::2] = -1  # every second request ends with its first token
    starts, limits = torch.arange(requests + 1) * width, torch.randint(1, 9, (requests,), generator=generator)
    tensors = (values.to(device) for values in (picked, drafts, starts.int(), stops, limits.int()))
    arguments = *tensors, width
    return {
        "what": "verify",
        "rows": len(picked),
        "unexplained": different(own.sampling.verify(*arguments), verify(*arguments)),
        "us": microseconds(lambda: own.sampling.verify(*arguments), scale, device),
        "pytorch_us": microseconds(lambda: verify(*arguments), scale, device),
    }


def _drafting(own: Implementation, requests: int, scale: Scale, device: torch.device) -> Iterator[Row]:
    followed = FollowedTexts(requests, scale.length, scale.served.vocab_size, device)
    made, reference = followed.drafts(own.drafts), followed.drafts(DeviceDrafts)
    unexplained = different(followed.iterate(made), followed.iterate(reference))
    for what, work in (("compare text", followed.observe), ("draft from text", followed.choose)):
        yield {
            "what": what,
            "rows": requests,
            "unexplained": unexplained,
            "us": microseconds(partial(work, made), scale, device),
            "pytorch_us": microseconds(partial(work, reference), scale, device),
        }


def different(found: Iterable[Tensor], expected: Iterable[Tensor]) -> int:
    """How many values differ; none may."""
    return sum(int((one != other).sum()) for one, other in zip(found, expected, strict=True))


def microseconds(work: Callable[[], object], scale: Scale, device: torch.device) -> float:
    """The time of one call among several, the least of `scale.repeats`."""
    found, calls = [], CALLS if device.type == "cuda" else 1
    for _ in range(scale.repeats + 1):  # the first one compiles and warms up
        _wait(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        _wait(device)
        found.append((time.perf_counter() - started) / calls)
    return 1e6 * min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
