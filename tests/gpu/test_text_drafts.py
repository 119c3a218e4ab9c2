"""Drafts from text on a GPU: the same as on a CPU, and the host never waits for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specrl.rollout.drafts.text_index import ANY_PROMPT, Text
from specrl.rollout.vllm.text_speculator import drafts_on
from tests.text_drafting import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: drafts from text were only tested on a CPU"),
]
STOP = 4
WORTH = [5, 4, 3, 2, 4.5, 3.5, 2.5, 1.5, 1, 1]


class WaitingIsAnError(Run):
    @contextmanager
    def around(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_text_is_found_and_compared_as_on_a_cpu_without_a_wait() -> None:
    generator = random.Random(0)
    answers = [generator.choices(range(4), k=generator.randint(1, 40)) + [STOP] * (row % 2) for row in range(40)]
    prompts = [generator.choice([ANY_PROMPT, 0, 1]) for _ in answers]
    texts = [Text(row, prompt) for row, prompt in zip(answers, prompts, strict=True)]
    found = []
    for kind, device in ((Run, "cpu"), (WaitingIsAnError, "cuda")):
        run = kind(texts, answers, 8, STOP, 15, device, type(drafts_on(torch.device(device), 8, 15)))
        run.run(WORTH, True)
        found.append(run.drafts.counts())
    assert found[0].right.sum() > 30
    for right, other in zip(*found, strict=True):
        assert (right == other).all()
