"""The trainer beside an engine in its process, on a real GPU: vLLM's streams and settings change no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor

from specrl.config import EngineConfig, PolicyConfig
from specrl.distributed import join, leave
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron.policy import Policy
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import likely_tokens, policy_weights, toy_config, write_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: no streams")]


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs[batch.mask].mean(), {}


def test_loss_and_gradient_are_the_same_beside_an_engine_that_generates(tmp_path: Path) -> None:
    """Up to the order in which attention's kernels add up gradients."""
    ranks = join()
    directory = write_policy(tmp_path / "policy", policy_weights(0), dtype="bfloat16")
    policy = Policy(directory, PolicyConfig(), dtype="bfloat16", ranks=ranks, seed=0)
    tokens = likely_tokens()
    sequences = [TokenSequence((tokens * 9)[index : index + 40 + index], 8, index) for index in range(12)]
    batches = pack(sequences, 256, policy.pad_multiple)

    def step() -> dict[str, float]:
        return policy.train_step(batches, mean_loss, lr=0.0)[0]

    alone = pytest.approx(step(), rel=1e-5)
    assert step() == alone
    engine = EngineConfig(compile=True, gpu_memory_fraction=0.3)
    config = toy_config("ngram", 3, dtype="bfloat16").model_copy(update={"engine": engine})
    with running(directory, None, config) as engine:
        for _ in range(2):
            engine.generate(mixed_requests(8))
            assert step() == alone
    parallel_state.destroy_model_parallel()
    leave()
