"""Engines over one rank and over two, beside each other: `python -m tests.integration.tensor_parallel_worker FOLDER`.

Everything is imported once; ranks are forked from there. Each leaves what it found as `NAME-RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrl.rollout.vllm.engine.arguments import ENVIRONMENT

os.environ.update(ENVIRONMENT, TORCHDYNAMO_DISABLE="1")  # compiling one small kernel takes longer than all the rest

import torch
from torch import Tensor

from specrl.config import Config
from specrl.distributed import Ranks, join, leave
from specrl.rollout.engine import Engine
from specrl.rollout.errors import RefitError
from specrl.rollout.refit.drafter_guard import ACCEPTANCE_LENGTH, DRAFTER_RELOADS, DrafterGuard
from tests.exactness.engines import logprobs_of, mixed_requests, verify_policy
from tests.exactness.toy import (
    ToyTrainer,
    drafter_weights,
    likely_tokens,
    policy_weights,
    toy_config,
    write_drafter,
    write_policy,
)
from tests.forks import fork, import_engine, wait

SIZES = {"alone": 1, "both": 2}
"""The number of ranks of each engine."""
SEQUENCES = [likely_tokens() * 4, [5, 9, 40, 60, 80, 100, 120]]
HALVES = {
    "model.embed_tokens.weight": 0,
    "model.layers.1.self_attn.k_proj.weight": 0,
    "model.layers.2.self_attn.o_proj.weight": 1,
    "model.layers.3.mlp.up_proj.weight": 0,
    "lm_head.weight": 0,
}
"""Tensors of the policy of which each of two ranks holds one half, and the dimension along which they are split."""
Weights = dict[str, Tensor]


def with_other_half(weights: Weights, name: str, dim: int, half: int) -> Weights:
    """Return the weights with one half of a tensor negated."""
    halves = list(weights[name].chunk(2, dim))
    halves[half] = -halves[half]
    return weights | {name: torch.cat(halves, dim)}


def error_of(check: Callable[[], object]) -> str:
    try:
        check()
    except (RefitError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def answers(engine: Engine) -> dict[str, Any]:
    generation = engine.generate(mixed_requests(20))
    return {
        "tokens": [response.tokens for response in generation.responses],
        "logprobs": [response.logprobs for response in generation.responses],
        "accepted": generation.stats.num_accepted_tokens,
        "sequences": logprobs_of(engine, SEQUENCES),
    }


def damages(engine: Engine, size: int) -> dict[str, str]:
    """Return what the comparison says of a policy that is damaged where one rank alone can see it."""
    policy, found = policy_weights(2), {}
    for name, dim in HALVES.items():
        for half in range(size):
            engine.refit(with_other_half(policy, name, dim, half).items(), None)
            found[f"{name} {half}"] = error_of(lambda: verify_policy(engine, policy.items()))
    return found


def guarded(engine: Engine, ranks: Ranks, size: int) -> list[Any]:
    """Return what the guard does when one rank's part of the drafter is damaged on its way, and what it says."""
    trainer = ToyTrainer(drafter_weights(3))
    guard = DrafterGuard(engine, trainer, mixed_requests(8), ranks)
    policy = policy_weights(2)
    engine.refit(policy.items(), trainer.named_weights())
    first = guard.check(3)
    damaged = with_other_half(trainer.weights, "midlayer.self_attn.q_proj.weight", 0, size - 1)
    engine.refit(policy.items(), damaged.items())
    second = guard.check(4)
    events = guard.take_events()
    reloads, lengths = ([state[name] for state in (first, second)] for name in (DRAFTER_RELOADS, ACCEPTANCE_LENGTH))
    return [*map(bool, reloads), lengths[0] == lengths[1], *events]


def work(folder: Path, ranks: Ranks, size: int) -> dict[str, Any]:
    """One rank of an engine over `size` ranks."""
    config = toy_config("eagle3", 3)
    sections = config.model_dump(by_alias=True)
    sections["engine"]["tensor_parallel"] = size
    sections["resources"]["ranks_per_node"] = size
    engine = Engine(folder / "policy", folder / "drafter", config=Config.model_validate(sections), seed=0)
    found: dict[str, Any] = {"before": answers(engine)}
    policy, drafter = policy_weights(1), drafter_weights(2)
    engine.refit(policy.items(), drafter.items())
    verify_policy(engine, policy.items())
    engine.verify_drafter(drafter.items())
    found["after"] = answers(engine)
    found["compares"] = engine.expected_policy() is not None
    found["is_first"] = engine.is_first
    found["agreed"] = [*engine.agreed(ranks.rank + 1, 2**50 + ranks.rank), engine.true_on_any_rank(ranks.rank == 1)]
    found["stopped"] = len(engine.generate(mixed_requests(4), stop=lambda: ranks.is_first).responses[0].tokens)
    found["damages"] = damages(engine, size)
    found["guard"] = guarded(engine, ranks, size)
    found["sleep"] = error_of(engine.sleep)
    engine.wake()
    engine.shutdown()
    return found


def start(folder: Path, name: str) -> list[int]:
    """Fork the ranks of one engine; return their process ids."""

    def run(rank: int) -> None:
        ranks = join()
        (folder / f"{name}-{rank}.json").write_text(json.dumps(work(folder, ranks, SIZES[name])))
        leave()

    return fork(SIZES[name], run)


def main(folder: Path) -> None:
    import_engine()
    write_policy(folder / "policy", policy_weights(0))
    write_drafter(folder / "drafter", drafter_weights(1))
    wait([process for name in SIZES for process in start(folder, name)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
