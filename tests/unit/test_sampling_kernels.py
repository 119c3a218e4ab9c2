"""The sampler's Triton kernels give the tokens of the PyTorch sampler, to the bit, and compile for the GPUs in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specrl.rollout.sampling.gumbel import Picked, pick
from specrl.rollout.sampling.verification import Verified, verify
from tests.kernel_processes import compiled, use_interpreter
from tests.kernel_processes import pick as pick_in_triton
from tests.kernel_processes import verify as verify_in_triton

KINDS = ("wide", "peaked", "flat", "few values", "equal", "masked", "one token", "far up", "far down", "huge")
BAD = {"nan": torch.nan, "inf": torch.inf}
Row = tuple[str, float, int, float]
ROWS = st.tuples(
    st.sampled_from([*KINDS, *BAD, "nothing"]),
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    st.sampled_from([0, 0, 1, 3, 50, 1200, 10**6]),
    st.sampled_from([1.0, 1.0, 1 - 2.0**-24, 0.95, 0.5, 1e-3]),
)


def logits_of(kind: str, vocab: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(vocab, generator=generator)
    place = int(torch.randint(vocab, (1,), generator=generator))
    if kind in BAD:
        noise[place] = BAD[kind]
    elif kind == "masked":
        noise[torch.rand(vocab, generator=generator) < 0.9] = -torch.inf
        noise[place] = 0.0
    elif kind == "one token":
        noise = torch.full((vocab,), -torch.inf).index_fill_(0, torch.tensor([place]), -3.0)
    elif kind == "nothing":
        noise.fill_(-torch.inf)
    elif kind == "few values":
        noise = (2 * noise).round() * torch.tensor([1.0, -1.0])[place % 2]  # -0 among them
    scale, offset = {"peaked": (9.0, 0.0), "flat": (0.05, 0.0), "equal": (0.0, 1.0), "huge": (1e37, 0.0)}.get(
        kind, (3.0, 0.0)
    )
    return noise if kind in BAD else noise * scale + {"far up": 5e3, "far down": -5e3}.get(kind, offset)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn"), use_interpreter) as pool:
        yield pool


def assert_same(found: Picked, expected: Picked) -> None:
    """Tokens to the bit; log-probs up to the last bits of a logarithm."""
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(found.log_kept_mass, expected.log_kept_mass, rtol=1e-6, atol=1e-6)


def test_pick_gives_the_tokens_of_the_pytorch_sampler(interpreter: ProcessPoolExecutor) -> None:
    @settings(max_examples=30)
    @given(
        st.lists(ROWS, max_size=8),
        st.sampled_from([3, 63, 1024, 1025, 2500, 5000]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.integers(0, 2**32),
    )
    @example([(kind, 1.0, 0, 1.0) for kind in (*KINDS, *BAD, "nothing")], 2500, torch.bfloat16, 1)
    @example([(kind, 0.7, 50, 0.95) for kind in (*KINDS, *BAD, "nothing")], 2500, torch.float32, 2)
    def holds(rows: list[Row], vocab: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        padded = torch.zeros(len(rows), vocab + 9)  # the engine's rows lie apart
        for index, (kind, *_) in enumerate(rows):
            padded[index, :vocab] = logits_of(kind, vocab, generator)
        logits = padded.to(dtype)[:, :vocab]
        temperature, top_p = (torch.tensor([row[column] for row in rows]) for column in (1, 3))
        top_k = torch.tensor([k for _, _, k, _ in rows], dtype=torch.int64)
        seeds = torch.randint(2**63 - 1, (len(rows),), generator=generator)
        positions = torch.randint(2**17, (len(rows),), generator=generator)
        arguments = logits, temperature.float(), top_k, top_p.float(), seeds, positions
        found = Picked(*interpreter.submit(pick_in_triton, *arguments).result())
        assert_same(found, pick(*arguments))

    holds()


def test_a_row_does_not_depend_on_its_batch(interpreter: ProcessPoolExecutor) -> None:
    generator = torch.Generator().manual_seed(3)
    count, vocab = 12, 3000
    logits = torch.randn(count, vocab, generator=generator) * 3
    temperature = torch.tensor([1.0, 0.6, 0.0, 1.3])[torch.arange(count) % 4]
    top_k, top_p = torch.tensor([0, 20, 0])[torch.arange(count) % 3], torch.tensor([1.0, 0.9])[torch.arange(count) % 2]
    arguments = logits, temperature, top_k, top_p, torch.arange(count) * 2**40, torch.arange(count)
    whole = interpreter.submit(pick_in_triton, *arguments).result()
    for part in (slice(0, 1), slice(5, 8), slice(7, 12)):
        alone = interpreter.submit(pick_in_triton, *(value[part] for value in arguments)).result()
        assert all(torch.equal(one, all_of[part]) for one, all_of in zip(alone, whole, strict=True))


TOKENS = st.integers(0, 3)  # few, so that drafts agree and responses end
REQUESTS = st.tuples(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6), st.integers(1, 7))


def test_verify_gives_what_going_from_token_to_token_gives(interpreter: ProcessPoolExecutor) -> None:
    @settings(max_examples=60)
    @given(st.lists(REQUESTS, max_size=6), st.lists(TOKENS, max_size=3), st.integers(0, 2))
    def holds(requests: list[tuple[list[tuple[int, int]], int]], ends: list[int], spare: int) -> None:
        rows = [row for found, _ in requests for row in found]
        picked, drafts = (torch.tensor([row[column] for row in rows], dtype=torch.int64) for column in (0, 1))
        starts = torch.tensor([0, *(len(found) for found, _ in requests)]).cumsum(0).int()
        stops = torch.tensor(ends, dtype=torch.int64)
        limits = torch.tensor([limit for _, limit in requests], dtype=torch.int32)
        width = max((len(found) for found, _ in requests), default=1) + spare
        arguments = picked, drafts, starts, stops, limits, width
        found = verify(*arguments)
        for (of_request, limit), tokens, count in zip(requests, *found, strict=True):
            picks, drafted = [pick for pick, _ in of_request], [draft for _, draft in of_request[1:]]
            accepted = accepted_prefix(drafted, picks, ends)
            right = picks[: min(accepted if accepted and picks[accepted - 1] in ends else accepted + 1, limit)]
            assert tokens.tolist() == right + [-1] * (width - len(right)) and count == len(right)
        kernel = Verified(*interpreter.submit(verify_in_triton, *arguments).result())
        assert all(torch.equal(*both) for both in zip(kernel, found, strict=True))

    holds()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_a_gpu_and_fuse_nothing(capability: int, dtype: str) -> None:
    """A fused multiplication and addition rounds once where the definition of a weight rounds twice."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for ptx, size in pool.submit(compiled, capability, dtype).result().values():
            assert size > 0
            assert f"sm_{capability}" in ptx and "fma.rn.f32" not in ptx


def accepted_prefix(drafts: Sequence[int], picked: Sequence[int], stop_tokens: Sequence[int] = ()) -> int:
    """Return how many leading draft tokens are those that the sampler picked, up to the end of the response.

    Past a stop token a draft may agree with what would have been picked, but such tokens are not part of the response.
    """
    count = 0
    for draft, token in zip(drafts, picked, strict=False):
        if draft != token:
            break
        count += 1
        if token in stop_tokens:
            break
    return count
