"""The probe that every refit is checked with: the trainer's log-probs are the truth, the engine's must equal them."""

from __future__ import annotations

from pathlib import Path

from specrl.config import Config
from specrl.rollout.engine import Engine
from specrl.rollout.parity import ParityReport, check_policy
from specrl.schemas import read_rollouts
from specrl.training.batches import Sequence, pack
from specrl.training.drafter import Drafter
from specrl.training.policy import Policy

NUM_SEQUENCES = 4
MAX_TOKENS = 64


def probe_sequences(rollouts_dir: Path) -> list[list[int]]:
    """A few of the policy's own responses to task prompts, with their prompts, cut to `MAX_TOKENS` tokens."""
    first = sorted(rollouts_dir.glob("step=*/rank-*.arrow"))[0]
    rollouts = read_rollouts(first)[:NUM_SEQUENCES]
    return [(rollout.prompt_tokens + rollout.response_tokens)[:MAX_TOKENS] for rollout in rollouts]


class RefitProbe:
    """Invariant 4: refit is checked, not assumed."""

    def __init__(self, sequences: list[list[int]], config: Config) -> None:
        self._sequences = sequences
        self._tolerance = config.engine.parity_tolerance
        self._whole_engines = config.engine.tensor_parallel == 1

    def check(self, engine: Engine, policy: Policy, drafter: Drafter | None) -> ParityReport:
        """Compare log-probs of every probe token after the first, and the drafter's tensors; collective over the ranks.

        The drafter is compared tensor by tensor rather than by its acceptance: cheaper, without noise. An engine split
        over ranks holds shards, which only the policy's log-probs can be checked through.

        Raises:
            PolicyParityError: log-probs differ by more than `engine.parity_tolerance` on average.
            DrafterCollapseError: the drafter inside the engine is not the one that was sent.
        """
        if drafter is not None and self._whole_engines:
            engine.verify_drafter(drafter.named_weights())
        batches = pack([Sequence(tokens, 1, i) for i, tokens in enumerate(self._sequences)], MAX_TOKENS)
        trainer: dict[int, list[float]] = {}
        for batch, logprobs in zip(batches, policy.logprobs(batches), strict=True):
            for row, index in enumerate(batch.indices):
                trainer[index] = logprobs[row][batch.mask[row]].tolist()
        return check_policy(
            engine.sequence_logprobs(self._sequences),
            [trainer[index] for index in range(len(self._sequences))],
            self._tolerance,
        )
