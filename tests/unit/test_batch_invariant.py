"""`engine.batch_invariant`: what vLLM is told before it is imported, and on which devices it is refused."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from specrl.rollout.vllm.engine.arguments import BATCH_INVARIANT, ENVIRONMENT
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


def test_what_a_shell_says_of_vllm_for_something_else_changes_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "of the shell")
    set_environment()
    kept = {name for name in ENVIRONMENT if os.environ[name] == "of the shell"}
    assert kept == {"VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND"}
