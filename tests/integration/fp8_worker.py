"""A policy in emulated FP8 on layouts of gloo ranks: `python -m tests.integration.fp8_worker FOLDER`.

Everything is imported once; ranks are forked from there.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import PolicyConfig
from specrl.distributed import Ranks, join, leave
from specrl.precision.kv_scales import KvObserver
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.calibration import CalibrationData, calibrate
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
from tests.forks import fork, wait

LAYOUTS = {"alone": (1, 1, 1), "tensor": (2, 2, 1), "pipeline": (2, 1, 2)}
"""(ranks, tensor parallel, pipeline parallel)"""
NUM_LAYERS, VOCAB = 4, 66
MAX_KL = 2e-4


def make_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def make_batches(seed: int, tokens_per_micro_batch: int = 80, pad_multiple: int = 1) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        TokenSequence(torch.randint(0, VOCAB, (length,), generator=generator).tolist(), 4, index)
        for index, length in enumerate((40, 33, 25, 18))
    ]
    return pack(sequences, tokens_per_micro_batch, pad_multiple)


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs[batch.mask].sum() / 100, {}


def measure(model_dir: Path, ranks: Ranks, tensor: int, pipeline: int) -> dict[str, Any]:
    config = PolicyConfig(tensor_parallel=tensor, pipeline_parallel=pipeline, lr=1e-3)

    def policy(fp8: Any, *, trainable: bool) -> Policy:
        return Policy(model_dir, config, dtype="float32", ranks=ranks, seed=0, fp8=fp8, trainable=trainable)

    batches = partial(make_batches, pad_multiple=tensor)
    switch = LinearPrecision(emulates=True)
    frozen = policy(switch, trainable=False)
    data = CalibrationData(batches(1), batches(2)[:1], batches(3), batches(4))
    calibration = calibrate(frozen, switch, data, MAX_KL, ranks)

    precision = LinearPrecision(["layers.1.linear_fc2"])
    trained = policy(precision, trainable=True)
    steps = [trained.train_step(batches(5), mean_loss)[0] for _ in range(2)]
    precision.assert_quantised(trained=True)
    plain = policy(None, trainable=True)
    config = config.model_copy(update={"recompute": True})
    recomputing = policy(None, trainable=True)
    recomputing.kv_observer = KvObserver(recomputing.model, NUM_LAYERS, ranks.device)
    recomputing.train_step(batches(5, 60), mean_loss)  # micro-batches of one sequence and of two
    return {
        "kv": recomputing.kv_observer.take(ranks),
        "calibration": calibration,
        "steps": steps,
        "plain": [plain.train_step(batches(5), mean_loss)[0] for _ in range(2)],
        "linears": sorted(precision.linears),
    }


def work(layout: str, scratch: Path) -> None:
    """One rank of a layout."""
    ranks = join()
    _, tensor, pipeline = LAYOUTS[layout]
    torch.save(measure(scratch / "model", ranks, tensor, pipeline), scratch / f"{layout}-{ranks.rank}.pt")
    leave()


def main(scratch: Path) -> None:
    for layout, (world, _, _) in LAYOUTS.items():
        wait(start(world, layout, scratch))


def start(world: int, layout: str, scratch: Path) -> list[int]:
    return fork(world, lambda rank: work(layout, scratch))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
