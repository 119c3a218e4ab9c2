"""The NumPy functions in the place of vLLM's Triton kernels against Triton's interpreter, which runs the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.rollout.vllm.cpu_kernels import STAND_INS
from tests.exactness.kernel_cases import K, Row, compare
from tests.kernel_processes import use_interpreter

pytestmark = pytest.mark.engine


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A request that reads a part of its prompt or its end, one that decodes, or one whose drafts are placeholders."""
    prefill = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["part", "end", "decode", "placeholders"]))
    is_dummy = draw(st.booleans())
    if kind == "part" and prefill > 1:
        computed = draw(st.integers(0, prefill - 2))
        return Row(prefill, computed, draw(st.integers(1, prefill - 1 - computed)), 0, 0, is_dummy)
    if kind == "end":
        computed = draw(st.integers(0, prefill - 1))
        return Row(prefill, computed, prefill - computed, 0, 1, is_dummy)
    drafted = draw(st.integers(0, K))
    computed = prefill - 1 if kind == "placeholders" else prefill + draw(st.integers(0, 30))
    return Row(prefill, computed, 1 + drafted, drafted, draw(st.integers(1, 1 + drafted)), is_dummy)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn"), use_interpreter) as pool:
        yield pool


@pytest.mark.parametrize("name", STAND_INS)
def test_it_writes_what_the_kernel_writes(interpreter: ProcessPoolExecutor, name: str) -> None:
    @settings(max_examples=40)
    @given(st.lists(rows(), max_size=6), st.integers(0, 3), st.integers(0, 2**32))
    def holds(batch: list[Row], padding: int, seed: int) -> None:
        assert interpreter.submit(compare, name, batch, max(1, len(batch) + padding), seed).result() is None

    holds()
