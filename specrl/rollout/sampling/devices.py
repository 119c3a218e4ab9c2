"""What samples on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from specrl.rollout.sampling.inverse_cdf import Picked, pick_at
from specrl.rollout.sampling.verification import Verified, verify


class Sampling(NamedTuple):
    """How tokens are picked and drafts verified on a device; the results are the same on every one."""

    pick: Callable[..., Picked]
    """With the arguments of `pick_at`."""
    verify: Callable[..., Verified]
    """With the arguments of `verify`."""


def sampling_on(device: torch.device) -> Sampling:
    """Return what samples on a device: Triton kernels on CUDA, which never wait for it, and PyTorch elsewhere."""
    if device.type != "cuda":
        return Sampling(pick_at, verify)
    from specrl.rollout.sampling import kernels

    return Sampling(kernels.pick, kernels.verify)
