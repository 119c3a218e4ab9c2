"""The section `sampler` of `specrl bench gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from specrl.bench.gpu.models import Row, Scale
from specrl.rollout.sampling.inverse_cdf import pick, uniforms


def measure(scale: Scale, folder: Path) -> Iterator[Row]:
    """Compare the picked tokens with those of FP64 on the CPU, and the time with torch's softmax and multinomial.

    Differences that rounding cannot have decided are unexplained, and must be 0.
    """
    del folder
    device, vocab = torch.device("cuda" if torch.cuda.is_available() else "cpu"), scale.served.vocab_size
    for rows in scale.batches:
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 4
        temperature, top_k, top_p = torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        u = uniforms(torch.arange(rows), torch.full((rows,), 7))
        cumulative = logits.double().softmax(-1).cumsum(-1)
        expected = torch.searchsorted(cumulative, u[:, None].double(), right=True)[:, 0]
        own, own_u = logits.to(device), u.to(device)
        differs = pick(own, temperature, top_k, top_p, own_u).tokens.cpu() != expected
        is_near = (cumulative - u[:, None].double()).abs().min(-1).values <= 1e-5
        yield {
            "rows": rows,
            "vocabulary": vocab,
            "unexplained": int((differs & ~is_near).sum()),
            "near_ties": int((differs & is_near).sum()),
            "ms": _ms(lambda: pick(own, temperature, top_k, top_p, own_u), device, scale.repeats),  # noqa: B023
            "torch_ms": _ms(lambda: own.softmax(-1).multinomial(1), device, scale.repeats),  # noqa: B023
        }


def _ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):  # the first one warms up
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return 1e3 * min(found[1:])
