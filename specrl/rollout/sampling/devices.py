"""What samples on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specrl.rollout.sampling.inverse_cdf import Picked, pick_at
from specrl.rollout.sampling.verification import Verified, verify


class Sampling(NamedTuple):
    """How tokens are picked, see `pick_at`, and drafts verified; the results are the same on every device."""

    pick: Callable[..., Picked]
    verify: Callable[..., Verified]


def sampling_on(device: torch.device) -> Sampling:
    """What samples on a device: Triton kernels on CUDA, which never wait for it, and PyTorch elsewhere."""
    if device.type != "cuda":
        return Sampling(pick_at, verify)
    from specrl.rollout.sampling import kernels

    return Sampling(kernels.pick, kernels.verify)
