"""The requests of `specrl bench rollouts`: held-out prompts, at fixed batch sizes and as a long-tailed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specrl.bench.options import TAIL
from specrl.bench.rollouts.rounds import TAIL_SIZE, Workload
from specrl.config import Config
from specrl.data.problems import Prompt, derive_seed
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.engine import Request, Response

LEAST_REQUESTS = 8
"""The least number of requests in a round, which are generated one batch after another; a shorter round would say
little."""


def pool(prompts: Sequence[Prompt], config: Config, stream: str = "bench") -> list[Request]:
    """Return 64 requests of natural length. If there are fewer prompts, they are repeated with other seeds."""
    origin = Origin(derive_seed(config.seed, stream), step=0)
    count = len(prompts)
    return [make_request(prompts[index % count], index // count, config, origin) for index in range(TAIL_SIZE)]


def workloads(
    requests: Sequence[Request],
    responses: Sequence[Response],
    batches: Sequence[int | str],
    repeats: int,
    max_tokens: int,
) -> list[Workload]:
    """Return one workload for each batch size.

    A fixed batch size takes the requests whose responses have at least `max_tokens` tokens, and cuts them there, so
    that the batch keeps its size until the end; if there are too few of them, it also takes those with the next longest
    responses. The rounds go through these requests in turn.

    Args:
        requests: The requests that `pool` returns.
        responses: The responses to them, in the same order.
        repeats: The number of rounds of each workload.
    """
    lengths = [len(response.tokens) for response in responses]
    order = sorted(range(len(requests)), key=lambda index: (-min(lengths[index], max_tokens), index))
    lasting = sum(length >= max_tokens for length in lengths)
    found = []
    for name in batches:
        if name == TAIL:
            found.append(Workload(TAIL, TAIL_SIZE, [list(requests)] * repeats))
            continue
        batch = int(name)
        count = max(batch, LEAST_REQUESTS)
        turn = order[: max(count, lasting)]
        picked = [[turn[(start * count + i) % len(turn)] for i in range(count)] for start in range(repeats)]
        cut = [[replace(requests[index], max_tokens=max_tokens) for index in indices] for indices in picked]
        found.append(Workload(batch, batch, cut))
    return found
