"""What ranks send each other of the rollouts of one RL step, and what they hold of them, in bytes per rank.

`specrl.training.rollouts` and `shares` say what travels: a few numbers of every rollout go to every rank, the tokens of
a rollout to the ranks that train on it, log-probs back to the rank that writes them, and pre-generated texts to the
ranks of the engine that answers the prompt next. A rollout is trained on by ranks that hold it already, as far as an
even distribution of work allows: `MOVED` is the share for which it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBERS_BYTES = 49
"""The bytes of the numbers of one rollout that every rank gets (`RolloutBatch`)."""
TOKEN_BYTES, LOGPROB_BYTES = 4, 4
"""The bytes of a token and of a log-prob on their way."""
MISMATCH_BYTES = 8 * 9224
"""The bytes of the sums about the disagreement of the engines (`MismatchSums`), without a number for each rank."""
CHUNK_BYTES = 64 * 2**20
"""The largest message in each direction (`specrl.distributed.arrays`)."""
MOVED = 0.05
"""The assumed share of the tokens that are trained on elsewhere than where they were generated, to even out the work.

Groups are dealt by expected length and lengths differ by chance, so that the sums of many responses differ little.
"""
GENERATED_BYTES = 4 + 2 * 4
"""The bytes per token of a rollout on the ranks that generated it: the token and two log-probs."""
LIST_BYTES = 40
"""The bytes per token of a stored text, which is a list of Python integers."""
TEXT_BYTES = 4
"""The bytes of text per token of a rollout."""
TRAINED_BYTES = 4 + 4 + 8 + 1 + 4
"""The bytes per token to train on: token, engine's log-prob, micro-batch with its mask, and the trainer's log-prob."""


@dataclass(frozen=True)
class ExchangeShape:
    """The size and layout of a step."""

    prompts: int
    """The number of prompts of a step."""
    samples: int
    """The number of responses to each prompt."""
    prompt_tokens: int
    """The mean length of a prompt."""
    response_tokens: int
    """The mean length of a response."""
    ranks: int
    engine_size: int = 1
    """The number of ranks of an engine."""
    tensor_parallel: int = 1
    """The number of tensor-parallel ranks of the policy."""
    pipeline_parallel: int = 1
    """The number of pipeline stages of the policy."""
    kept_mass: bool = False
    """Whether the mass that top-k and top-p keep is recorded at each token."""
    route_bytes: int = 0
    """The bytes of each token's routes through experts: layers x experts per token x 2; 0 without experts."""
    pregenerated: float = 0.0
    """The share of the next step's tokens that bubbles generate before."""

    @property
    def rollouts(self) -> int:
        """The number of rollouts of a step."""
        return self.prompts * self.samples

    @property
    def model_size(self) -> int:
        """The number of ranks over which the policy is divided."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class ExchangeCost:
    """The bytes of one rank in one step; those that are sent are of an engine's first rank, which sends for all."""

    sent: float
    received: float
    host: float
    """The host memory of the rollouts and of what is on its way."""

    def seconds(self, bytes_per_second: float) -> float:
        """Return how long the larger direction takes at this bandwidth of a rank."""
        return max(self.sent, self.received) / bytes_per_second


def exchange_cost(shape: ExchangeShape, moved: float = MOVED) -> ExchangeCost:
    """Return what a rank sends, receives and holds in one step.

    Args:
        moved: The share of the tokens that are trained on elsewhere than where they were generated.
    """
    per_engine = shape.rollouts * shape.engine_size / shape.ranks
    trained = shape.rollouts * shape.model_size / shape.ranks
    tokens, length = shape.response_tokens, shape.prompt_tokens + shape.response_tokens
    at_home = min(1.0, shape.engine_size / shape.model_size) * (1 - moved)
    to_train = trained * (length * (TOKEN_BYTES + shape.route_bytes) + tokens * LOGPROB_BYTES) * (1 - at_home)
    returned = per_engine * tokens * LOGPROB_BYTES * (1 - (1 - moved) / shape.pipeline_parallel)
    texts = per_engine * tokens * TOKEN_BYTES * shape.pregenerated
    everywhere = 0.0 if shape.ranks == 1 else shape.rollouts * NUMBERS_BYTES + MISMATCH_BYTES + 8 * shape.ranks
    remote = 0.0 if shape.ranks == 1 else to_train + returned + texts
    generated = GENERATED_BYTES + TEXT_BYTES + shape.route_bytes + (4 if shape.kept_mass else 0)
    host = per_engine * tokens * generated + trained * length * (TRAINED_BYTES + shape.route_bytes)
    host += per_engine * tokens * shape.pregenerated * LIST_BYTES + everywhere
    host += 2 * min(CHUNK_BYTES, remote)
    return ExchangeCost(everywhere + remote * shape.engine_size, everywhere + remote, host)
