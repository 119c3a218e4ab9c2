"""Test of the copies that checkpoints are written from, on a real GPU."""

from __future__ import annotations

import pytest
import torch

from specrl.training.checkpoint.files import HostCopy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing to pin")]


def test_a_copy_is_pinned_and_filled_again() -> None:
    copy = HostCopy()
    for size in (2**20, 2**20, 3 * 2**20):
        tensors = {"a": torch.rand(size, device="cuda"), "steps": torch.arange(3), "b": torch.ones(3, device="cuda")}
        found = copy.fill(tensors)
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())
        assert found["a"].is_pinned()
    del copy
    assert not found["a"].is_pinned()
