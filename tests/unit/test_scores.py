"""Log-probs and entropies from logits have the values and the gradients of autograd's, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from specrl.processes import free_port
from specrl.training.megatron import scores
from specrl.training.megatron.scores import token_scores

ROWS, VOCABULARY, TEMPERATURE = 37, 50, 0.7


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, some of them of policies that are all but certain; targets; and a random weight of each output."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(ROWS, VOCABULARY, generator=generator) * 3).to(dtype)
    logits[::5, 7] += 120
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    targets[::10] = 7
    return logits, targets, torch.randn(2, ROWS, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)], ids=["logprobs", "entropy", "both"])
def test_gradients_are_those_of_autograd(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, used: tuple[bool, bool]
) -> None:
    monkeypatch.setitem(scores.CHUNK_ELEMENTS, "cpu", 8 * VOCABULARY)
    given, targets, weights = inputs(dtype)

    expected = given.double().requires_grad_()
    lp = (expected / TEMPERATURE).log_softmax(-1)
    outputs = lp.gather(1, targets[:, None])[:, 0], -(lp.exp() * lp).sum(-1)
    sum((out * weight).sum() for out, weight, use in zip(outputs, weights, used, strict=True) if use).backward()

    logits = given.clone().requires_grad_()
    found = token_scores(logits * 1, targets, temperature=TEMPERATURE, first=0, group=group)
    sum((out * weight).sum() for out, weight, use in zip(found, weights, used, strict=True) if use).backward()

    for out, other in zip(found, outputs, strict=True):
        torch.testing.assert_close(out.detach().double(), other.detach(), atol=2e-5, rtol=1e-5)
    assert logits.grad is not None and expected.grad is not None and logits.grad.isfinite().all()
    # float32 rounds logits of 170 to 1e-5, and bfloat16 has 8 bits.
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(logits.grad.double(), expected.grad, **tolerance)


def test_only_a_chunk_of_the_logits_is_float32_at_a_time(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: p log p of the whole vocabulary at once."""
    monkeypatch.setitem(scores.CHUNK_ELEMENTS, "cpu", 8 * VOCABULARY)
    largest, xlogy = [0], torch.xlogy

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        largest[0] = max(largest[0], left.numel())
        return xlogy(left, right)

    monkeypatch.setattr(torch, "xlogy", watched)
    given, targets, _ = inputs(torch.bfloat16)
    token_scores(given.requires_grad_() * 1, targets, temperature=1.0, first=0, group=group)[1].sum().backward()
    assert largest == [8 * VOCABULARY]
