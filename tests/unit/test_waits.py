"""The host runs ahead of the device: inside a micro-batch, and in the drafter's steps, it waits for no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import PolicyConfig, parse_config
from specrl.distributed import Ranks, join, leave
from specrl.training.batches import TokenSequence, pack
from specrl.training.drafter import chains
from specrl.training.features import Window
from specrl.training.megatron import policy as policies
from specrl.training.megatron.policy import Policy
from specrl.training.update import StepLoss
from tests.unit.test_drafter import DEEP, make_drafter, make_features, write_policy
from tests.waits import counting

# isort: split
from megatron.core import parallel_state

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


def sequences() -> list[TokenSequence]:
    generator = np.random.default_rng(1)
    return [TokenSequence([*[row // 2] * 5, *generator.integers(0, 64, 9 + row)], 5, row) for row in range(6)]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the passes over all micro-batches wait for."""
    found: Counter[str] = Counter()
    choose: Callable[..., Any] = policies.get_forward_backward_func

    def counted(**arguments: Any) -> Any:
        items = list(arguments.pop("data_iterator"))
        on_host = [tensor for batch, _ in items for tensor in (batch.segments, batch.spans)]
        with counting(found, on_host):
            return choose()(data_iterator=iter(items), **arguments)

    monkeypatch.setattr(policies, "get_forward_backward_func", lambda: counted)
    return found


def test_what_makes_the_host_wait_is_counted() -> None:
    """Mutation: a counter that sees nothing."""
    found: Counter[str] = Counter()
    tensor = torch.arange(4)
    with counting(found, [tensor]):
        float(tensor.sum())
        tensor[tensor > 1]
        (tensor + 1).numpy()
        tensor.tolist()
    assert sorted(found) == ["aten._local_scalar_dense.default", "aten.index.Tensor", "numpy"]


@pytest.mark.parametrize("windows", [False, True])
def test_a_micro_batch_of_the_policy_waits_for_nothing(
    windows: bool, waits: Counter[str], ranks: Ranks, tmp_path: Path
) -> None:
    """With the step's own loss, a KL penalty, and features for the drafter."""
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    config = parse_config({"name": "waits", "train": {"loss": "gspo", "correction": "seq-mask", "kl_coef": 0.1}})
    policy = Policy(tmp_path, PolicyConfig(), dtype="float32", ranks=ranks, seed=0)
    rows = {item.index: np.full(item.response_length, -4.0, np.float32) for item in sequences()}
    own = {item.index: replace(item, generation_logprobs=rows[item.index]) for item in sequences()}
    loss = StepLoss(config.train, own, np.ones(6), 100.0, old=rows, reference=rows)
    kept = {index: Window(3, 12) for index in (0, 3, 4)} if windows else None
    batches = pack(sequences(), 40)
    assert len(batches) > 2
    policy.train_step(batches, loss, features=(1, 2, 4), windows=kept)
    assert not waits


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("shape", [{}, DEEP | {"sliding_window": 16}], ids=["one layer", "several layers and a window"])
def test_a_step_of_the_drafter_waits_as_often_for_many_rows_as_for_one(
    shape: dict[str, Any], policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the mask, the gradient's norm, the flag, and how far drafts came."""

    def found(rows: int, most: int) -> Counter[str]:
        monkeypatch.setattr(chains, "MAX_CHAINS", most)
        drafter = make_drafter(policy_dir, **shape)
        features = make_features(drafter, [(6, 4 + row) for row in range(rows)])
        features.tokens[:, :6], features.hidden[:, :5] = features.tokens[0, :6], features.hidden[0, :5]
        batch = drafter._pack(features)  # what it has on the host is read there
        assert batch is not None
        waits: Counter[str] = Counter()
        with counting(waits):
            learnt = drafter._step(batch, 1e-3, measure=True)
        assert learnt.norm > 0
        return waits

    few, many = found(2, 1024), found(6, 5)
    assert few == many == {"aten._local_scalar_dense.default": 2, "tolist": 1}


def test_packing_chains_waits_for_no_row(policy_dir: Path) -> None:
    """For the mask alone. What `tolist` and `nonzero` read lies on the host."""

    def found(rows: int) -> Counter[str]:
        drafter = make_drafter(policy_dir)
        features = make_features(drafter, [(6, 4 + row) for row in range(rows)])
        features.tokens[:, :6], features.hidden[:, :5] = features.tokens[0, :6], features.hidden[0, :5]
        waits: Counter[str] = Counter()
        with counting(waits):
            batch = drafter._pack(features)
        assert batch is not None
        return waits

    few, many = found(2), found(6)
    assert few["cpu"] == many["cpu"] == 1
    for name in ("aten.equal.default", "aten._local_scalar_dense.default"):
        assert not few[name] and not many[name]
