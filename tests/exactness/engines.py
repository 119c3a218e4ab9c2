"""Engines on the toy policy, alone in the test process, and requests that exercise them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from specrl.config import Config
from specrl.rollout.engine import Engine, Request, Response, response_seed
from tests.exactness.toy import likely_tokens

SETTINGS = ((1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.9, 0), (0.6, 0.9, 0), (0.0, 1.0, 0), (1.0, 1.0, 5), (1.3, 0.8, 8))
"""(temperature, top_p, top_k), mixed within every batch."""


@contextmanager
def running(
    policy_dir: Path, drafter_dir: Path | None, config: Config, *, reads_policy: bool = True, **overrides: Any
) -> Iterator[Engine]:
    """An engine, and afterwards the process as it was: without a process group, unless another engine still uses it."""
    alone = not dist.is_initialized()
    engine = Engine(policy_dir, drafter_dir, config=config, seed=0, reads_policy=reads_policy, overrides=overrides)
    try:
        yield engine
    finally:
        engine.shutdown()
        if alone:
            dist.destroy_process_group()


def mixed_requests(count: int, *, longest_prompt: int = 100, max_tokens: int = 48, seed: int = 0) -> list[Request]:
    """Random prompts of 1 to `longest_prompt` tokens; a third of them starts with the same 64 tokens."""
    generator, tokens = random.Random(seed), likely_tokens()
    shared = generator.choices(tokens, k=64)
    requests = []
    for index in range(count):
        prompt = generator.choices(tokens, k=generator.randint(1, longest_prompt))
        if index % 3 == 0:
            prompt = shared + prompt[: longest_prompt - 64 or 1]
        temperature, top_p, top_k = SETTINGS[index % len(SETTINGS)]
        request_seed = response_seed(seed, 0, index, 0)
        requests.append(Request(prompt, request_seed, generator.randint(1, max_tokens), temperature, top_p, top_k))
    return requests


def in_batches(engine: Engine, requests: list[Request], size: int) -> list[Response]:
    """Responses, at most `size` requests running at once."""
    starts = range(0, len(requests), size)
    return [response for start in starts for response in engine.generate(requests[start : start + size]).responses]


def verify_policy(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Compare the engine's policy with these weights."""
    expected = engine.expected_policy()
    expected.take(weights)
    expected.check()


def logprobs_of(engine: Engine, sequences: list[list[int]]) -> list[list[float]]:
    """The log-probs of all tokens of each sequence but the first."""
    return engine.score(sequences)[0]
