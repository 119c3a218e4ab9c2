"""`engine.batch_invariant`: what vLLM is told before it is imported, and on which devices it is refused."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from specrl.rollout.vllm.engine.arguments import BATCH_INVARIANT
from specrl.rollout.vllm.engine.lifecycle import set_environment


def become(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.pop(BATCH_INVARIANT, None)


def test_vllm_is_told_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, (9, 0))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    set_environment(batch_invariant=True)
    assert os.environ[BATCH_INVARIANT] == "1"
    monkeypatch.setitem(sys.modules, "vllm", torch)
    set_environment(batch_invariant=True)  # another engine of this process


def test_it_is_refused_where_vllm_was_imported_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "vllm", torch)
    with pytest.raises(ValueError, match=r"^engine\.batch_invariant = true: vLLM has been imported without it[^\n]+$"):
        set_environment(batch_invariant=True)
    assert BATCH_INVARIANT not in os.environ


def test_it_is_refused_on_devices_where_the_trainer_would_lose_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, (8, 0))
    with pytest.raises(ValueError, match=r"^engine\.batch_invariant = true needs .* 9\.0 .*this one has 8\.0[^\n]+$"):
        set_environment(batch_invariant=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_is_refused_on_cpus() -> None:
    with pytest.raises(ValueError, match=r"^engine\.batch_invariant = true: vLLM has .* for GPUs alone[^\n]+$"):
        set_environment(batch_invariant=True)
