"""Emulated FP8 and its calibration on tensor and pipeline shards: the same numbers as on one rank.

Sizes are such that shard boundaries are block boundaries; elsewhere each shard has blocks of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import PolicyConfig
from specrl.distributed import Ranks, join, leave
from specrl.models.families import LLAMA
from specrl.precision.kv_scales import KvObserver
from specrl.precision.recipe import layer_names
from specrl.processes import free_port
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.calibration.calibration import CalibrationData, SwitchableLinears, calibrate
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy

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


def make_batches(seed: int, tokens_per_micro_batch: int = 80) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        TokenSequence(torch.randint(0, VOCAB, (length,), generator=generator).tolist(), 4, index)
        for index, length in enumerate((40, 33, 25, 18))
    ]
    return pack(sequences, tokens_per_micro_batch)


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs[batch.mask].sum() / 100, {}


def measure(model_dir: Path, ranks: Ranks, tensor: int, pipeline: int) -> dict[str, Any]:
    config = PolicyConfig(tensor_parallel=tensor, pipeline_parallel=pipeline, lr=1e-3)

    def policy(fp8: Any, *, trainable: bool) -> Policy:
        return Policy(model_dir, config, dtype="float32", ranks=ranks, seed=0, fp8=fp8, trainable=trainable)

    switch = SwitchableLinears()
    frozen = policy(switch, trainable=False)
    data = CalibrationData(make_batches(1), make_batches(2)[:1], make_batches(3), make_batches(4))
    calibration = calibrate(frozen, switch, data, MAX_KL, ranks)

    precision = LinearPrecision(["layers.1.linear_fc2"])
    trained = policy(precision, trainable=True)
    steps = [trained.train_step(make_batches(5), mean_loss)[0] for _ in range(2)]
    precision.assert_quantised(trained=True)
    plain = policy(None, trainable=True)
    config = config.model_copy(update={"recompute": True})
    recomputing = policy(None, trainable=True)
    recomputing.kv_observer = KvObserver(recomputing.model, NUM_LAYERS, ranks.device)
    recomputing.train_step(make_batches(5, 60), mean_loss)  # micro-batches of one sequence and of two
    return {
        "kv": recomputing.kv_observer.take(ranks),
        "calibration": calibration,
        "steps": steps,
        "plain": [plain.train_step(make_batches(5), mean_loss)[0] for _ in range(2)],
        "linears": sorted(precision.linears),
    }


def run_rank(rank: int, world: int, port: int, layout: str, scratch: Path) -> None:
    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
    }
    ranks = join()
    _, tensor, pipeline = LAYOUTS[layout]
    torch.save(measure(scratch / "model", ranks, tensor, pipeline), scratch / f"{layout}-{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    scratch = tmp_path_factory.mktemp("fp8")
    make_model(scratch / "model")
    found = {}
    for layout, (world, _, _) in LAYOUTS.items():
        port = free_port()
        mp.spawn(run_rank, (world, port, layout, scratch), nprocs=world)  # type: ignore[no-untyped-call]
        files = [scratch / f"{layout}-{rank}.pt" for rank in range(world)]
        found[layout] = [torch.load(file, weights_only=False) for file in files]
    return found


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_fp8_training_is_the_same_on_shards(results: dict[str, list[dict[str, Any]]], layout: str) -> None:
    (alone,) = results["alone"]
    for found in results[layout]:
        for key in ("loss", "grad_norm"):
            values, expected = ([step[key] for step in steps] for steps in (found["steps"], alone["steps"]))
            assert values == pytest.approx(expected, rel=1e-2)
    assert alone["steps"][0]["grad_norm"] != pytest.approx(alone["plain"][0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_scales_of_a_kv_cache_are_the_same_on_shards_that_recompute(
    results: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    """With pipeline parallelism other micro-batches pass between a forward pass and its recomputation."""
    expected = results["alone"][0]["kv"][0]
    for found in (rank["kv"][0] for rank in results[layout]):
        for letter in "qkv" if layout == "pipeline" else "":
            assert getattr(found, letter) == getattr(expected, letter)
        assert [max(found.k), max(found.v)] == pytest.approx([max(expected.k), max(expected.v)], rel=0.05)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_every_shard_is_quantised(results: dict[str, list[dict[str, Any]]], layout: str) -> None:
    names = [set(found["linears"]) for found in results[layout]]
    assert set.union(*names) == set(layer_names(LLAMA, NUM_LAYERS)) - {"layers.1.linear_fc2"}
    if layout == "pipeline":
        assert not names[0] & names[1]


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_calibration_is_the_same_on_shards(results: dict[str, list[dict[str, Any]]], layout: str) -> None:
    expected = results["alone"][0]["calibration"]
    assert 0 < expected.kl_chosen <= MAX_KL < expected.kl_all_fp8
    for found in (rank["calibration"] for rank in results[layout]):
        assert found.kl_all_fp8 == pytest.approx(expected.kl_all_fp8, rel=0.1)
        assert 0 < found.kl_chosen <= MAX_KL
        for row, other in zip(found.rows, expected.rows, strict=True):
            assert (row.name, row.flops_per_token) == (other.name, other.flops_per_token)
            assert row.activation_amax_max == pytest.approx(other.activation_amax_max, rel=1e-3)
            assert row.weight_amax == other.weight_amax
            if layout == "pipeline" or row.name.endswith(("qkv", "fc1")):
                assert row.relative_error == pytest.approx(other.relative_error, rel=1e-2)
            assert count(found.weight_scales[row.name]) == count(expected.weight_scales[row.name])
    assert results[layout][0]["calibration"] == results[layout][1]["calibration"]


def count(scales: list[list[list[float]]]) -> int:
    return sum(len(row) for shard in scales for row in shard)
