"""Nothing between logits and accepted drafts waits for the device, and every replaced part of vLLM names its test."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from specrl.rollout.vllm.replacements import REPLACEMENTS


class KernelCalls(NamedTuple):
    """What an iteration asks of the device."""

    launched: list[str]
    """The names of our kernels, in order."""
    waits: list[str]
    """The operations that wait for the device or copy from it."""


def calls_of_an_iteration() -> KernelCalls:
    """Verify a batch with drafts as on a GPU, on tensors without values: what needs a value would raise an error."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from specrl.rollout.vllm import replacements
    from specrl.rollout.vllm.engine.lifecycle import set_environment

    set_environment()
    replacements.install()
    from specrl.rollout.drafts.device_drafts import NUM_FACTS
    from specrl.rollout.sampling import kernels
    from specrl.rollout.sampling.verification import Sampling
    from specrl.rollout.vllm import device_sampler

    launched: list[str] = []
    waits: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: launched.append(self.name)

    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (
                "_local_scalar_dense" in str(func)
                or "nonzero" in str(func)
                or ("_to_copy" in str(func) and ((kwargs or {}).get("device") is not None))
            ):
                waits.append(str(func))
            return func(*args, **(kwargs or {}))

    for name in ("sum_blocks", "keep_most_probable", "pick_tokens", "accept"):
        setattr(kernels, name, Noted(name))
    # vLLM's own two kernels on the path; their launches are vLLM's.
    device_sampler.gather_draft_sampled = lambda ids, positions, rows, *_: (ids[rows], positions[rows])
    device_sampler.get_num_sampled_and_rejected = lambda counts, *_: (counts, counts)
    with FakeTensorMode(), Waits():
        state = SimpleNamespace(gpu=torch.zeros(8, dtype=torch.int32))
        names = ("temperature", "top_k", "top_p", "seeds")
        sampler = object.__new__(device_sampler.InvariantSampler)
        sampler.sampling = Sampling(kernels.pick, kernels.verify)
        sampler.sampling_states = SimpleNamespace(**dict.fromkeys(names, state))
        sampler.req_states = SimpleNamespace(prefill_len=state, total_len=state)
        sampler.req_states.facts = SimpleNamespace(gpu=torch.zeros(8, NUM_FACTS, dtype=torch.int64))
        stops = torch.zeros(2, dtype=torch.int64)
        sampler.req_states.drafts = SimpleNamespace(sources=state.gpu, lengths=state.gpu, stop_tokens=stops)
        verifier = object.__new__(device_sampler.InvariantVerifier)
        verifier.sampler, verifier.num_speculative_steps = sampler, 3
        batch = SimpleNamespace(
            num_reqs=4,
            input_ids=torch.zeros(16, dtype=torch.int32),
            positions=torch.zeros(16, dtype=torch.int64),
            logits_indices=torch.zeros(16, dtype=torch.int64),
            expanded_idx_mapping=torch.zeros(16, dtype=torch.int64),
            expanded_local_pos=torch.zeros(16, dtype=torch.int32),
            idx_mapping=torch.zeros(4, dtype=torch.int64),
            cu_num_logits=torch.zeros(5, dtype=torch.int32),
            cu_num_logits_np=np.arange(0, 17, 4),
            seq_lens=torch.zeros(4, dtype=torch.int32),
        )
        verifier(torch.zeros(16, 5000), batch)
    return KernelCalls(launched, waits)


@pytest.mark.engine
def test_from_logits_to_accepted_drafts_nothing_waits_for_the_device() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(calls_of_an_iteration).result() == KernelCalls(
            ["sum_blocks", "keep_most_probable", "pick_tokens", "accept"], []
        )


def test_every_replacement_names_a_test_that_exists() -> None:
    for replacement in REPLACEMENTS:
        path, name = replacement.test.split("::")
        assert f"def {name}(" in Path(path).read_text()
