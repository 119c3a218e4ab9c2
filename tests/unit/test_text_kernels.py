"""The kernels that draft from text give what the PyTorch version gives, to the bit, and compile for the GPUs in use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from specrl.rollout.drafts import kernels
from specrl.rollout.drafts.device_drafts import NUM_FACTS, Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.kernels import TritonDrafts
from specrl.rollout.drafts.text_index import ANY_PROMPT, END, Text
from tests.kernel_processes import compiled_for_text, iterate_with_text, run_with_text, use_interpreter
from tests.text_drafting import Run, iterate
from tests.unit.test_text_index import TEXTS, TOKENS, Waits, without_values

SLOTS, LONGEST_SEQUENCE = 4, 24
PROMPTS = [2**62 - 1, ANY_PROMPT, 0, 1]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn"), use_interpreter) as pool:
        yield pool


@st.composite
def iterations(draw: st.DrawFn) -> list[list[tuple[int, ...]]]:
    """Three iterations of some requests, as `laid_out` takes them; the last one computes some that have ended."""
    begun = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True)):
        prompt = draw(st.sampled_from(PROMPTS))
        prompt_length = draw(st.integers(1, 6))
        limit = prompt_length + draw(st.integers(1, 14))
        row = draw(st.sampled_from([0, slot + 1, slot + 1, slot + 1, 9]))
        begun.append([slot, row, prompt, prompt_length, prompt_length + draw(st.integers(0, 3)), limit])
    found = []
    for _ in range(3):
        news = [draw(st.integers(0, 5)) for _ in begun]
        for request, new in zip(begun, news, strict=True):
            request[4] += new
        found.append([(*request, new) for request, new in zip(begun, news, strict=True)])
    return found


def test_drafts_are_chosen_and_compared_as_in_pytorch(interpreter: ProcessPoolExecutor) -> None:
    @settings(max_examples=60)
    @given(TEXTS, iterations(), st.integers(0, 2**32), st.sampled_from([0, 2, 3]), st.sampled_from([1, 3, 5, 15]))
    def holds(texts: list[Text], rows: list[list[tuple[int, ...]]], seed: int, passes: int, k: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 3, (SLOTS, LONGEST_SEQUENCE + 3), dtype=torch.int32, generator=generator)
        tokens = tokens[:, :LONGEST_SEQUENCE]  # rows lie apart
        drafter = torch.randint(END, 3, (SLOTS, k + 2), generator=generator)[:, : min(passes, k)]
        arguments = texts, rows, tokens, drafter if passes else None, k, min(k, 2 + seed % 2)
        found = interpreter.submit(iterate_with_text, *arguments).result()
        for of_kernel, wanted in zip(found, iterate(DeviceDrafts, *arguments), strict=True):
            assert torch.equal(of_kernel, wanted)

    holds()


def test_requests_that_take_turns_get_the_right_drafts(interpreter: ProcessPoolExecutor) -> None:
    @settings(max_examples=15)
    @given(TEXTS, st.lists(TOKENS.filter(len), min_size=1, max_size=5), st.integers(1, 3), st.booleans())
    def holds(texts: list[Text], answers: list[list[int]], slots: int, ghosts: bool) -> None:
        worth = [5, 4, 3, 2, 4.5, 3.5, 2.5, 1.5, 1, 1]
        arguments = texts, answers, slots, 3, 5
        found = interpreter.submit(run_with_text, *arguments, worth, ghosts).result()
        run = Run(*arguments)
        run.run(worth, ghosts)
        for of_kernel, wanted in zip(found, run.drafts.counts(), strict=True):
            assert (of_kernel == wanted).all()

    holds()


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_a_gpu(capability: int) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for ptx, size in pool.submit(compiled_for_text, capability).result().values():
            assert size > 0
            assert f"sm_{capability}" in ptx


def test_an_iteration_takes_two_launches_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: launched.append(self.name)

    for name in ("compare", "find_drafts"):
        monkeypatch.setattr(kernels, name, Noted(name))
    drafts = TritonDrafts(SLOTS, 5)
    mode = FakeTensorMode()
    without_values(mode, drafts)
    without_values(mode, drafts.index)
    with mode, Waits() as waits:
        lengths = torch.zeros(SLOTS, dtype=torch.int32)
        facts = torch.zeros(SLOTS, NUM_FACTS, dtype=torch.int64)
        requests = Requests(facts, lengths, torch.zeros(SLOTS, LONGEST_SEQUENCE, dtype=torch.int32))
        batch = Batch(*(torch.zeros(2, dtype=torch.int32) for _ in Batch._fields))
        drafter = torch.zeros(2, 3, dtype=torch.int64)
        waits.calls.clear()
        drafts.observe(requests, batch)
        drafts.choose(requests, batch, drafter, 5)
    assert launched == ["compare", "find_drafts"]
    assert waits.found == []
    assert [name for name in waits.calls if name.startswith("aten.")] == ["aten.empty.memory_format"]
