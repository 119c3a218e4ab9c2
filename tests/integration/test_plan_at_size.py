"""The plan's memory against what PyTorch allocates for 8B parameters in the shipped configurations, phase by phase."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specrl.config import Config, load_config
from specrl.distributed import Ranks
from specrl.models.shapes import ModelShape, model_shape
from specrl.projection import memory
from specrl.projection.memory import GIB, Rank
from specrl.training.drafter import attention, trainer
from specrl.training.drafter.chains import pack_chains
from specrl.training.drafter.kinds.eagle3 import Eagle3, Eagle3Shape
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features
from specrl.training.megatron import scores
from tests import fake_memory
from tests.forks import ROOT, run_module
from tests.integration.memory_worker import QWEN3_8B, RANKS

NAMES = ("qwen3-8b-rl-zero", "qwen3-8b-rl-think")
WITHIN = 0.05


def configured(name: str) -> Config:
    return load_config(ROOT / f"configs/{name}.toml")


def rank_of(config: Config, *, samples: int) -> Rank:
    """A rank whose prompts have so many responses: those in one micro-batch share its keys and values."""
    train = config.train.model_copy(update={"samples_per_prompt": samples})
    shape: ModelShape = model_shape(config.model)
    return Rank(shape, config.model_copy(update={"train": train}), 1, RANKS // config.policy.tensor_parallel)


@pytest.mark.parametrize("name", NAMES)
def test_the_policys_memory_is_planned_phase_by_phase(name: str, tmp_path: Path) -> None:
    run_module("tests.integration.memory_worker", ROOT / f"configs/{name}.toml", tmp_path / "found.json")
    found = {key: size / GIB for key, size in json.loads((tmp_path / "found.json").read_text()).items()}
    config = configured(name)
    alone, sharing = (rank_of(config, samples=samples) for samples in (1, config.train.samples_per_prompt))
    items = {item.name: item.gib for item in memory.policy_items(sharing, trainable=True)}
    resident = sum(items[key] for key in ("policy weights", "gradients", "masters and Adam moments"))
    activations = memory.activations(alone, trainable=True).gib
    planned = {
        "resident": resident,
        "optimizer's step": 0.0,
        "forward, response": memory.logits(alone, trainable=False).gib,
        "update, response": max(memory.saved_bytes(alone) / GIB + items["logits"], activations),
        "update, prompt": activations,
        "update, shared prompts": items["activations"],
    }
    print(name, *(f"{key}: {planned[key]:.2f} planned, {found[key]:.2f}" for key in planned), sep="\n  ")
    assert planned == pytest.approx(found, rel=WITHIN)


class Reader:
    """Of a folder whose tensors are as large as those of the model."""

    names = ("lm_head.weight",)

    def __init__(self, _: Path) -> None:
        pass

    def read(self, name: str) -> torch.Tensor:
        rows = () if name == "model.norm.weight" else (QWEN3_8B.vocab_size,)
        return torch.empty(*rows, QWEN3_8B.hidden_size, dtype=torch.bfloat16)


def features_of(length: int, layers: int) -> Features:
    """Of one response, with what decides the shapes; the rest is fake."""
    tokens, mask = torch.zeros(1, length, dtype=torch.int64), torch.ones(1, length, dtype=torch.bool)
    mask[:, -1] = False
    nothing = torch.zeros(1).expand(1, length, 1)
    return Features(tokens, mask, nothing, tokens, starts=torch.zeros(1, dtype=torch.int64))


def measured_drafter(name: str) -> dict[str, float]:
    """In a process of its own: what an engine has replaced in torch does not go with fake tensors."""
    config = configured(name)
    drafter, length = config.drafter, config.model.max_length
    replaced: list[tuple[Any, str, Any]] = [
        (trainer, "TensorReader", Reader),
        (trainer, "AutoConfig", SimpleNamespace(from_pretrained=lambda _: QWEN3_8B)),
        (Eagle3, "to", lambda self, _: self),  # a fake parameter cannot be moved
        (attention, "_kernel_for", lambda _: attention._Flash),
    ]
    for owner, attribute, new in replaced:
        setattr(owner, attribute, new)
    draft_tokens = torch.arange(drafter.draft_vocab_size)
    shape = Eagle3Shape.from_policy(QWEN3_8B, drafter.draft_vocab_size, drafter.intermediate_size)
    host = features_of(length, len(shape.feature_layers))
    batch = pack_chains(host, draft_tokens, QWEN3_8B.vocab_size, drafter.ttt_steps)
    assert batch is not None
    with fake_memory.counted() as live:
        own = Drafter(Eagle3(shape), draft_tokens, Path(), drafter, Ranks(0, 1, 0, torch.device("cpu")), seed=0)
        size, before = QWEN3_8B.hidden_size, live.now
        hidden = torch.empty(1, length, len(own.feature_layers) * size, dtype=torch.bfloat16)
        features = live.now - before
        given = replace(batch, features=replace(host, hidden=hidden))
        # Adam's moments, which are made at the end, are less.
        activations = live.peak_of(lambda: own._step(given, 1e-4, measure=False, alone=True))
        resident = live.now - features
    return {"resident": resident / GIB, "update": activations / GIB}


@pytest.mark.parametrize("name", NAMES)
def test_the_drafters_memory_is_planned_phase_by_phase(name: str) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(measured_drafter, name).result()
    config = configured(name)
    rank = rank_of(config, samples=1)
    items = {item.name: item.gib for item in memory.drafter_items(rank, responses=RANKS)}
    planned = {
        "resident": items["drafter and its Adam"] + items["drafter's embeddings"],
        "update": memory.drafter_activations(rank, config.model.max_length).gib,
    }
    print(name, *(f"{key}: {planned[key]:.2f} planned, {found[key]:.2f}" for key in planned), sep="\n  ")
    assert planned == pytest.approx(found, rel=WITHIN)


def test_the_plan_and_the_output_layer_have_the_same_bounds() -> None:
    assert memory.MAX_LOGITS == scores.MAX_LOGITS
    assert {0: scores.CHUNK_ELEMENTS["cpu"], 1: scores.CHUNK_ELEMENTS["cuda"]} == memory.LOGIT_CHUNK
