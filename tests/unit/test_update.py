from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specrl.config import Config
from specrl.schemas import Rollout
from specrl.training.update import _own_micro_batches, align


def test_align_puts_values_where_the_mask_is_true() -> None:
    mask = torch.tensor([[False, True, True, False], [True, False, False, False]])
    assert align([[1.0, 2.0], [3.0]], mask).tolist() == [[0, 1, 2, 0], [3, 0, 0, 0]]


def test_micro_batches_are_padded_as_the_policy_needs() -> None:
    policy: Any = SimpleNamespace(dp_rank=0, dp_size=1, pad_multiple=16)
    lengths = (3, 14, 30)
    rollouts = [
        Rollout(0, 0, 0, i, 0, 0, 0, [5, 6], [7] * length, [0.0] * length, "", "", "stop")
        for i, length in enumerate(lengths)
    ]
    batches = _own_micro_batches(policy, rollouts, [0, 1, 2], Config(name="pad"))
    assert [batch.tokens.shape[1] for batch in batches] == [32]
    assert [batch.num_tokens for batch in batches] == [sum(lengths)]


def test_align_refuses_another_number_of_values() -> None:
    with pytest.raises(AssertionError):
        align([[1.0]], torch.tensor([[True, True]]))
