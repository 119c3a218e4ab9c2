"""Log-probabilities from hidden states: exact, and with a bounded number of logits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specrl.distributed import join, leave
from specrl.training.megatron import scores
from specrl.training.megatron.scores import OutputLayer, token_scores

ROWS, HIDDEN, VOCABULARY, PADDED, TEMPERATURE = 37, 16, 47, 50, 0.7


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    join()
    yield
    leave()


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    grad: Tensor

    @classmethod
    def of(cls, dtype: torch.dtype) -> Problem:
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (ROWS, PADDED))
        targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
        return cls(hidden, weight, targets, torch.randn(2, ROWS, generator=generator))

    def solve(self, used: Sequence[int] = (0,)) -> list[Tensor]:
        """Log-probs, entropies, and the gradients of hidden states and weight."""
        assert torch.distributed.group.WORLD is not None
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]  # as Megatron's buffers give it

        def logits(rows: Tensor) -> Tensor:
            return (rows @ weight.t())[:, :VOCABULARY]

        layer = OutputLayer(weight, logits, 0, VOCABULARY, torch.distributed.group.WORLD)
        scores = token_scores(hidden, self.targets, layer, temperature=TEMPERATURE)
        self.backward(scores, used)
        assert hidden.grad is not None and weight.grad is not None
        gradient = weight.main_grad + weight.grad  # type: ignore[attr-defined]  # which the buffers add up
        return [*(score.detach() for score in scores), hidden.grad, gradient]

    def backward(self, scores: Sequence[Tensor], used: Sequence[int]) -> None:
        torch.stack([(scores[index] * self.grad[index]).sum() for index in used]).sum().backward()  # type: ignore[no-untyped-call]

    def expected(self, used: Sequence[int] = (0,)) -> list[Tensor]:
        hidden, weight = (part.double().requires_grad_() for part in (self.hidden, self.weight))
        logprobs = ((hidden @ weight[:VOCABULARY].t()) / TEMPERATURE).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(1, self.targets[:, None])[:, 0]
        self.backward((chosen, entropy), used)
        assert hidden.grad is not None and weight.grad is not None
        return [chosen.detach(), entropy.detach(), hidden.grad, weight.grad]


def in_parts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(scores, "MAX_LOGITS", rows * PADDED)
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", {"cpu": max(1, rows // 2) * VOCABULARY})


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [1, 5, ROWS - 1, ROWS, 100])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["logprobs", "entropy", "both"])
def test_scores_and_gradients_are_those_of_plain_autograd(
    used: Sequence[int], rows: int, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of one row, of several with a shorter last one, and whole."""
    in_parts(monkeypatch, rows)
    problem = Problem.of(dtype)
    if used == (1,):
        bound *= 4  # p log p and p H cancel out in part
    for found, expected in zip(problem.solve(used), problem.expected(used), strict=True):
        assert float((found.double() - expected).norm()) <= bound * float(expected.norm())


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["logprobs", "entropy", "both"])
def test_a_policy_that_is_all_but_certain_has_finite_gradients(used: Sequence[int]) -> None:
    problem = Problem.of(torch.float32)
    problem.hidden[::5] *= 8
    for found, expected in zip(problem.solve(used)[2:], problem.expected(used)[2:], strict=True):
        # float32 rounds logits of some hundreds to 1e-5.
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-4)


class Largest(TorchDispatchMode):
    """The most elements of a tensor whose rows are over the vocabulary, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() == 2 and found.shape[0] != HIDDEN and found.shape[1] >= VOCABULARY:
            self.elements[found.dtype] = max(self.elements.get(found.dtype, 0), found.numel())
        return found


def test_no_more_logits_exist_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 6)
    with Largest() as largest:
        Problem.of(torch.bfloat16).solve()
    assert largest.elements == {torch.bfloat16: 6 * PADDED, torch.float32: 3 * VOCABULARY}


def test_a_micro_batch_without_tokens_has_gradients_of_zero() -> None:
    problem = Problem.of(torch.float32)
    empty = Problem(problem.hidden[:0], problem.weight, problem.targets[:0], problem.grad[:, :0])
    logprobs, _, hidden, weight = empty.solve()
    assert len(logprobs) == len(hidden) == 0
    assert torch.equal(weight, torch.zeros_like(weight))
