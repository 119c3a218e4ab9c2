"""Routing replay in the trainer: tokens go to the engine's experts, and where the routers would differ is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from specrl.config import ModelConfig, PolicyConfig
from specrl.config.model import TinyModelConfig
from specrl.distributed import Ranks, join, leave
from specrl.models.sources import materialise_model
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron.policy import Policy

# isort: split
from megatron.core import parallel_state

LAYERS, EXPERTS, CHOSEN = 6, 8, 2
TEXTS = [[4 + (i * step) % 90 for i in range(length)] for step, length in ((7, 30), (11, 21), (13, 12), (17, 9))]
CHANGED = [(0, 5, 1), (0, 5, 2), (0, 20, 0), (2, 0, 1)]
"""(text, token, layer) at which the engine's experts are made up: three tokens, four pairs."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 64}
    tiny = TinyModelConfig(family="qwen3_moe", num_layers=LAYERS, **sizes)
    model = ModelConfig(source="tiny", dtype="float32", max_length=64, tiny=tiny)
    return materialise_model(model, 0, tmp_path_factory.mktemp("routing") / "model")


@torch.no_grad()
def own_routes(policy_dir: Path) -> list[NDArray[Any]]:
    """What transformers' routers choose, for all tokens but the last."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    found = []
    for tokens in TEXTS:
        logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        found.append(torch.stack([layer.topk(CHOSEN).indices for layer in logits], 1).numpy().astype(np.uint8))
    return found


def other_routes(policy_dir: Path) -> list[NDArray[Any]]:
    routes = own_routes(policy_dir)
    for text, token, layer in CHANGED:
        routes[text][token, layer] = (routes[text][token, layer] + 3) % EXPERTS
    return routes


def batches_of(routes: list[NDArray[Any]] | None) -> list[MicroBatch]:
    """Three micro-batches, of which the last has padding."""
    sequences = [TokenSequence(text, 2, i, routes and routes[i]) for i, text in enumerate(TEXTS)]
    return pack(sequences, 24)


def loss(logprobs: Tensor, _: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * batch.mask).sum() / 70, {}


def trained(
    policy_dir: Path, ranks: Ranks, routes: list[NDArray[Any]] | None, **config: Any
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float]]:
    """Log-probs before a step, the weights after it, and the disagreement during the step."""
    policy = Policy(policy_dir, PolicyConfig(clip_grad=1e9, **config), dtype="float32", ranks=ranks, seed=0)
    batches = batches_of(routes)
    logprobs = policy.logprobs(batches)
    assert policy.routing is not None
    policy.routing.clear()
    policy.train_step(batches, loss)
    weights = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    return logprobs, weights, policy.routing.disagreement()


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_the_routers_own_choice_replayed_changes_nothing(policy_dir: Path, ranks: Ranks) -> None:
    plain, weights, nothing = trained(policy_dir, ranks, None)
    routes = [np.flip(layers, -1) for layers in own_routes(policy_dir)]  # in another order
    logprobs, after, disagreement = trained(policy_dir, ranks, routes)
    assert nothing == {}
    assert disagreement == {"mismatch/routing_tokens": 0.0, "mismatch/routing_layers": 0.0}
    assert all(torch.equal(a, b) for a, b in zip(plain, logprobs, strict=True)) and equal(weights, after)


def test_tokens_go_to_the_engines_experts_also_where_activations_are_computed_again(
    policy_dir: Path, ranks: Ranks
) -> None:
    routes = other_routes(policy_dir)
    plain, own_weights, _ = trained(policy_dir, ranks, None)
    logprobs, weights, disagreement = trained(policy_dir, ranks, routes)
    num_tokens = sum(len(text) - 1 for text in TEXTS)
    # Behind the changed experts the tokens' own choice may change, but nothing before them.
    assert 3 <= disagreement["mismatch/routing_tokens"] * num_tokens < num_tokens
    assert 4 <= disagreement["mismatch/routing_layers"] * num_tokens * LAYERS < num_tokens
    _, again, _ = trained(policy_dir, ranks, routes, recompute=True)
    assert equal(weights, again) and not equal(weights, own_weights)
    expected = forced_logprobs(policy_dir, routes)
    for batch, rows in zip(batches_of(routes), logprobs, strict=True):
        for row, index in enumerate(batch.indices):
            torch.testing.assert_close(rows[row][batch.mask[row]], expected[index][1:], atol=2e-5, rtol=0)
    assert not torch.equal(plain[0], logprobs[0])


def test_without_the_replay_the_disagreement_is_measured_all_the_same(policy_dir: Path, ranks: Ranks) -> None:
    plain, weights, _ = trained(policy_dir, ranks, None)
    logprobs, after, disagreement = trained(policy_dir, ranks, other_routes(policy_dir), routing_replay=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, logprobs, strict=True)) and equal(weights, after)
    num_tokens = sum(len(text) - 1 for text in TEXTS)
    assert disagreement["mismatch/routing_tokens"] == pytest.approx(3 / num_tokens)
    assert disagreement["mismatch/routing_layers"] == pytest.approx(4 / (num_tokens * LAYERS))


@torch.no_grad()
def forced_logprobs(policy_dir: Path, routes: list[NDArray[Any]]) -> list[Tensor]:
    """What transformers computes with these experts, weighted by its own logits."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    found = []
    for tokens, chosen in zip(TEXTS, routes, strict=True):
        hooks = []
        for number, layer in enumerate(model.model.layers):
            indices = torch.from_numpy(chosen[:, number].astype(np.int64))

            def force(_: Any, __: Any, output: Any, indices: Tensor = indices) -> Any:
                weights = output[0].softmax(-1).gather(-1, indices)
                return output[0], (weights / weights.sum(-1, keepdim=True)).to(output[1].dtype), indices

            hooks.append(layer.mlp.gate.register_forward_hook(force))
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0])
        for hook in hooks:
            hook.remove()
    return found
