"""A policy with experts on layouts of gloo ranks: `python -m tests.integration.expert_worker FOLDER`.

The tests compare what the layouts leave behind. Everything is imported once; ranks are forked from there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from specrl.config import PolicyConfig
from specrl.distributed import Ranks, join, leave
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import TrainState, load
from specrl.training.megatron.policy import Policy
from tests.forks import fork, wait
from tests.integration import policy_worker as shared

# isort: split
from megatron.core import parallel_state

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


@dataclass(frozen=True)
class Layout:
    """How many ranks share a policy, and how."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    source: str | None = None
    """The name of the layout whose checkpoint it goes on from, in the same folder."""
    recompute: bool = False


LAYOUTS = {
    "alone": Layout(1, recompute=True),
    "data": Layout(2),
    "experts": Layout(2, expert=2),
    "tensor": Layout(2, tensor=2),
    "tensor and experts": Layout(2, tensor=2, expert=2, recompute=True),
    "pipeline": Layout(2, pipeline=2),
    "moved": Layout(2, tensor=2, source="experts"),
    "tensor, pipeline and experts": Layout(4, tensor=2, pipeline=2, expert=2),
    "all experts apart": Layout(4, tensor=2, expert=4, source="tensor, pipeline and experts"),
}


def make_model(directory: Path) -> None:
    """A random model whose routers choose clearly."""
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared.SHAPE, **EXPERTS, head_dim=16, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def routed(sequence: TokenSequence) -> TokenSequence:
    """The sequence with experts as an engine could have chosen them, other ones than the routers would."""
    tokens = np.array(sequence.tokens[:-1])[:, None]
    first = tokens + np.arange(len(tokens))[:, None] + np.arange(shared.SHAPE["num_hidden_layers"])
    count = EXPERTS["num_experts"]
    return replace(sequence, routes=np.stack([first % count, (first + 1 + first % 5) % count], -1).astype(np.uint8))


def my_batches(policy: Policy, *, with_routes: bool = False) -> list[MicroBatch]:
    rows = shared.my_sequences(policy)
    return pack([routed(row) for row in rows] if with_routes else rows, 90, policy.pad_multiple)


def run(name: str, layout: Layout, ranks: Ranks, scratch: Path) -> dict[str, Any]:
    """What a layout computes, what two updates make of it, the second with given experts, and its checkpoint."""
    config = PolicyConfig(
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.pipeline,
        expert_parallel=layout.expert,
        recompute=layout.recompute,
        **shared.CONFIG,
    )
    policy = Policy(scratch / "model", config, dtype="float32", ranks=ranks, seed=0)
    if layout.source is not None:
        load(scratch / layout.source / "step=000001", policy, None)
    batches, replayed = my_batches(policy), my_batches(policy, with_routes=True)
    result: dict[str, Any] = {"loaded": shared.weights_of(policy)}
    result["num_parameters"] = sum(parameter.numel() for parameter in policy.model.parameters())
    features = policy.forward_features(batches, shared.LAYERS)
    result["hidden"] = shared.by_sequence(batches, [item.hidden for item in features])
    result["logprobs"] = shared.by_response(batches, policy.logprobs(batches, temperature=0.7))
    checkpoints = Checkpoints(scratch / name, policy, Retention(1))
    if layout.source is not None:
        checkpoints.save(TrainState(1, policy, None))
        checkpoints.wait()
    result["metrics"] = []
    if layout.source is None:
        result["metrics"].append(policy.train_step(batches, shared.loss)[0])
        checkpoints.save(TrainState(1, policy, None))
        checkpoints.wait()
    assert policy.routing is not None
    result["replayed"] = shared.by_response(replayed, policy.logprobs(replayed, temperature=0.7))
    policy.routing.clear()
    result["metrics"].append(policy.train_step(replayed, shared.loss)[0])
    result["disagreement"] = policy.routing.disagreement()
    result["trained"] = shared.weights_of(policy)
    return result


def work(world: int, scratch: Path) -> None:
    """One rank of `world`: the layouts of so many ranks, one after another."""
    ranks = join()
    for name, layout in LAYOUTS.items():
        if layout.world == world:
            torch.save(run(name, layout, ranks, scratch), scratch / f"{name}-{ranks.rank}.pt")
            parallel_state.destroy_model_parallel()  # a run keeps one layout per process; here it saves start-ups
    leave()


def main(scratch: Path) -> None:
    wait([*start(1, scratch), *start(2, scratch)])
    wait(start(4, scratch))


def start(world: int, scratch: Path) -> list[int]:
    return fork(world, lambda rank: work(world, scratch))


def merged(results: list[dict[str, Any]], key: str) -> dict[int, Tensor]:
    """What the data-parallel ranks have of each sequence."""
    return {index: tensor for result in results for index, tensor in result[key].items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
