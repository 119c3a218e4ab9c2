"""The hand-written forward and backward passes of the policy, against autograd on the textbook formulas."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specrl.training.megatron import cpu_layers
from specrl.training.megatron.cpu import exchange, kernels, weights
from specrl.training.megatron.cpu.weights import _Embedding, linear
from specrl.training.megatron.cpu_layers import SwiGLU, _RMSNorm
from specrl.training.megatron.scores import columns_of, most_likely, token_scores


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_same(ours: Callable[..., Tensor], textbook: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Outputs and gradients agree; the textbook computes in float64."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = textbook(*doubles)
    found = ours(*inputs)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    tolerance = 3e-2 if inputs[0].dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    for mine, reference in zip(inputs, doubles, strict=True):
        assert mine.grad is not None and reference.grad is not None
        scale = float(reference.grad.abs().max())
        torch.testing.assert_close(mine.grad.double() / scale, reference.grad / scale, atol=tolerance, rtol=0)


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 without OpenMP"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """The types of a policy; the passes that Numba compiles take BF16 alone, and run on the threads of OpenMP."""
    name, _, without = request.param.partition(" ")
    if without:
        monkeypatch.setattr(kernels, "OPENMP", "libnone.so")
        kernels._run_on_threads.cache_clear()
        request.addfinalizer(kernels._run_on_threads.cache_clear)
    found: torch.dtype = getattr(torch, name)
    return found


def test_rms_norm(dtype: torch.dtype) -> None:
    def textbook(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt()

    assert_same(lambda x, w: _RMSNorm.apply(x, w, 1e-2), textbook, leaves((5, 3, 16), (16,), dtype=dtype))


def summing(parameter: Tensor) -> Tensor:
    """Give a parameter the sum that Megatron keeps of its gradients, which holds something already."""
    parameter.main_grad = torch.full(parameter.shape, 2.0)  # type: ignore[attr-defined]
    return parameter


def test_weight_gradients_are_added_where_megatron_sums_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 20)
    monkeypatch.setattr(cpu_layers, "BLOCK_ELEMENTS", 20)
    tokens = torch.tensor([[3, 1], [1, 4], [3, 3]])

    def run(table: Tensor, scale: Tensor, matrix: Tensor) -> Tensor:
        return linear(_RMSNorm.apply(_Embedding.apply(tokens, table, None), scale, 1e-2), matrix)

    shapes = ((6, 8), (8,), (11, 8))
    plain, summed = leaves(*shapes, dtype=dtype), [summing(tensor) for tensor in leaves(*shapes, dtype=dtype)]
    factor = torch.randn(3, 2, 11, generator=torch.Generator().manual_seed(5))
    expected = run(*plain)
    found = run(*summed)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    (expected * factor).sum().backward()
    (found * factor).sum().backward()
    for without, parameter in zip(plain, summed, strict=True):
        assert without.grad is not None and parameter.grad is None
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            parameter.main_grad - 2.0,  # type: ignore[attr-defined]
            without.grad.float(),
            atol=tolerance,
            rtol=tolerance,
        )


def test_a_single_rank_exchanges_nothing(group: dist.ProcessGroup) -> None:
    buffer = torch.ones(20)
    version = buffer._version
    exchange.reduce_scatter(buffer, buffer, group=group)
    exchange.all_gather(buffer, buffer, group=group)
    assert buffer._version == version, "the buffer was written"


PAGE_FAULTS = """
import ctypes, resource, torch
from specrl.training import heap
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault may bring 512 pages where a system likes that
def page_faults(more=0):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24 + more)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with heap.kept():
    page_faults(more=2**10)  # the C library looks for more than it returns, to align it
    print(page_faults())
print(page_faults())
with heap.kept(left=2**30):
    page_faults(more=2**12)
with heap.kept(left=2**30):
    print(page_faults())
with heap.kept(left=2**20):  # more is free
    pass
with heap.kept(left=2**30):
    print(page_faults())
zeros = heap.untouched_zeros((2**12, 2**12), torch.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
zeros[:2].add_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, *map(int, (zeros.sum(), zeros.numel())))
"""


def test_freed_memory_is_kept_up_to_the_next_update_and_zeros_take_none_before_their_use() -> None:
    """In a process of its own, because what other tests have allocated decides where memory is found."""
    output = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True).stdout
    inside, outside, again, too_much, touched, total, size = map(int, output.split())
    pages = 2**26 // resource.getpagesize()
    assert inside < pages // 8 and outside > pages // 2
    assert again < pages // 8 and too_much > pages // 2
    assert touched < pages // 8 and (total, size) == (2**13, 2**24)


def test_swiglu(dtype: torch.dtype) -> None:
    def textbook(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    assert_same(SwiGLU(), textbook, leaves((5, 3, 16), dtype=dtype))


def rounded_once(tensor: Tensor) -> Tensor:
    """What is at most one place of BF16 from a number in float64, whose own rounding may fall on either side."""
    return tensor.abs() * 2**-8 * 1.001 + 1e-30


@pytest.mark.parametrize("threads", [1, 2])
def test_passes_over_bf16_round_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that follow each other round in between; whatever the number of threads, each row is computed once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(6)
    x, grad = (6 * torch.randn(37, width, generator=generator) for width in (80, 40))
    x, grad = x.bfloat16(), grad.bfloat16()
    gate, up = x.double().requires_grad_().chunk(2, 1)
    expected = F.silu(gate) * up
    result, slope = torch.empty_like(grad), torch.empty_like(x)
    kernels.swiglu(37, 40, x, result)
    kernels.swiglu_backward(37, 40, x, grad, slope)
    assert bool(((result - expected).abs() <= rounded_once(expected)).all())
    gradients = torch.cat(torch.autograd.grad(expected, (gate, up), grad.double()), 1)
    assert bool(((slope - gradients).abs() <= rounded_once(gradients) + 1e-4).all())
    scores = 20 * torch.randn(6 * 5, 11, generator=generator)
    weights = torch.empty(30, 11, dtype=torch.bfloat16)
    seen = torch.arange(11) <= 11 - 5 + torch.arange(5).repeat(6)[:, None]
    exact = (scores.double() * 0.3).masked_fill(~seen, float("-inf")).softmax(1)
    kernels.softmax(30, 11, 5, 0.3, scores, weights)
    assert bool(((weights - exact).abs() <= rounded_once(exact)).all())


def test_a_number_that_is_none_is_not_lost_in_a_pass() -> None:
    scores, weights = torch.zeros(2, 4), torch.empty(2, 4, dtype=torch.bfloat16)
    scores[1, 2] = float("nan")
    kernels.softmax(2, 4, 1, 1.0, scores, weights)
    assert weights[0].tolist() == [0.25] * 4 and bool(weights[1].isnan().all())
    x, result = torch.ones(1, 4, dtype=torch.bfloat16), torch.empty(1, 2, dtype=torch.bfloat16)
    x[0, 0] = float("nan")
    kernels.swiglu(1, 2, x, result)
    assert result.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_log_probs_and_entropy(
    group: dist.ProcessGroup, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrl.training.megatron.scores.CHUNK_ELEMENTS", {"cpu": 100})
    targets = torch.tensor([0, 30, 7, 7, 12, 3, 30])

    def ours(logits: Tensor) -> Tensor:
        # A copy: the logits are overwritten.
        return token_scores(logits.clone(), targets, temperature=temperature, first=0, group=group)[0]

    def textbook(logits: Tensor) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    assert_same(ours, textbook, leaves((7, 31)))
    assert_same(ours, textbook, leaves((7, 31), dtype=torch.bfloat16))
    (logits,) = leaves((7, 31))
    _, entropy = token_scores(logits * 3, targets, temperature=temperature, first=0, group=group)
    expected = torch.distributions.Categorical(logits=logits.detach() * 3 / temperature).entropy()
    torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad


def test_nothing_to_score_is_no_error(group: dist.ProcessGroup) -> None:
    (logits,) = leaves((0, 31))
    logprobs, entropy = token_scores(
        logits * 1, torch.zeros(0, dtype=torch.int64), temperature=1.0, first=0, group=group
    )
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)


def test_the_most_likely_token_is_the_lowest_among_equals(group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 2.0]])
    assert most_likely(logits, 0, group).tolist() == [1, 0]
    assert torch.equal(columns_of(logits, torch.tensor([2, 0]), 0, group), logits[:, [2, 0]])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_matrix_is_multiplied_with_a_few_rows_as_in_float32(threads: int) -> None:
    matrix, inputs = (tensor.detach() for tensor in leaves((37, 24), (kernels.PRODUCT_ROWS, 24)))
    matrix = matrix.bfloat16()
    if not kernels.take(matrix):
        pytest.skip("PyTorch has an OpenMP of another name here, and its operators compute these products")
    found, before = torch.empty(kernels.PRODUCT_ROWS, 37), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernels.few_products(37, 24, matrix, inputs, found)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, inputs @ matrix.float().T)
