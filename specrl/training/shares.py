"""Which rank trains on which rollouts: tokens are sent there, and log-probs return to the rank that writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrl.data.dealing import deal_near_home
from specrl.distributed import Ragged, Ranks, Route, deliver, gather_rows
from specrl.schemas import as_array, sampled_mask
from specrl.training.batches import TokenSequence
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch

Rows = dict[int, NDArray[np.float32]]
"""A value for each sampled token, by rollout number."""


@dataclass(frozen=True)
class TrainingShares:
    """The rollouts that each data-parallel rank trains on, in one or several updates; the same on every rank."""

    ranks: Ranks
    dealt: list[list[list[int]]]
    """By update and data-parallel rank: the numbers of its rollouts."""
    dp_ranks: NDArray[np.int64]
    computes_loss: NDArray[np.bool_]
    """By rank: whether it is on the last pipeline stage, where log-probs are computed and compared."""
    is_first_shard: NDArray[np.bool_]
    """By rank: whether it is the first tensor-parallel rank; all of them have the same log-probs."""

    @classmethod
    def of(cls, policy: Policy, rollouts: RolloutBatch, parts: Sequence[list[int]]) -> TrainingShares:
        """Deal each update's rollouts, by number, into shares of about equal work, moving few of them (collective).

        The responses to a prompt stay together, so that they share it, unless some rank would then have more to do.
        """
        own = [policy.dp_rank, policy.pp_rank == policy.pp_size - 1, policy.tp_rank == 0]
        layout = gather_rows(policy.ranks, np.array(own, np.int64))
        homes = layout[rollouts.homes(), 0]
        dealt = [deal_groups(rollouts, part, homes, policy.dp_size) for part in parts]
        return cls(policy.ranks, dealt, layout[:, 0], layout[:, 1] == 1, layout[:, 2] == 1)

    @property
    def reports(self) -> bool:
        return bool(self.computes_loss[self.ranks.rank] and self.is_first_shard[self.ranks.rank])

    def own(self, update: int) -> list[int]:
        return self.dealt[update][int(self.dp_ranks[self.ranks.rank])]

    def deliver(
        self, rollouts: RolloutBatch, experts: tuple[str, tuple[int, int]] | None = None
    ) -> dict[int, TokenSequence]:
        """Send what is learned from each rollout to the ranks that train on it (collective).

        `experts` is the type and the shape of a token's routes. Returns this rank's rollouts by number.
        """
        held = list(rollouts.held.values())
        columns = {
            "prompt": Ragged.of([rollout.prompt_tokens for rollout in held], np.int32),
            "response": Ragged.of([rollout.response_tokens for rollout in held], np.int32),
            "turns": Ragged.of([rollout.turns for rollout in held], np.int32),
            "generation_logprobs": Ragged.of([rollout.whole_generation_logprobs for rollout in held], np.float32),
        }
        if experts is not None:
            columns["routes"] = Ragged.of([() if row.routes is None else row.routes for row in held], *experts)
        trained = [self._trained_by(rank) for rank in range(self.ranks.world_size)]
        found = rollouts.deliver(self.ranks, columns, trained)
        return {
            number: _sequence(number, {name: rows[place] for name, rows in found.items()})
            for place, number in enumerate(trained[self.ranks.rank].tolist())
        }

    def return_logprobs(self, rollouts: RolloutBatch, found: Rows) -> None:
        """Set the computed `policy_logprobs` of rollouts on the ranks that write them (collective)."""
        everyone, nothing = range(self.ranks.world_size), np.empty(0, np.int64)
        held = [self._trained_by(rank) if self.computes_loss[rank] else nothing for rank in everyone]
        sender = np.full(len(rollouts), -1, np.int64)
        for rank in np.flatnonzero(self.computes_loss & self.is_first_shard):
            sender[held[rank]] = rank
        written_by = np.where(sender >= 0, rollouts.first_ranks(), -1)
        wanted = [np.flatnonzero(written_by == rank) for rank in everyone]
        rows = Ragged.of([found[number] for number in held[self.ranks.rank].tolist()], np.float32)
        returned = deliver(self.ranks, {"logprobs": rows}, Route(sender, wanted, held))["logprobs"]
        for number, row in zip(wanted[self.ranks.rank].tolist(), returned, strict=True):
            rollouts.held[number].policy_logprobs = as_array("f", row)

    def _trained_by(self, rank: int) -> NDArray[np.int64]:
        dp_rank = int(self.dp_ranks[rank])
        return np.array(sorted(number for update in self.dealt for number in update[dp_rank]), np.int64)


def _sequence(number: int, row: Mapping[str, NDArray[Any]]) -> TokenSequence:
    turns, routes = row["turns"], row.get("routes")
    return TokenSequence(
        np.concatenate([row["prompt"], row["response"]]),
        len(row["prompt"]),
        number,
        None if routes is None or not len(routes) else routes,
        sampled_mask(turns) if len(turns) else None,
        row["generation_logprobs"],
    )


def deal_groups(
    rollouts: RolloutBatch, numbers: Sequence[int], homes: NDArray[np.int64], num_shares: int
) -> list[list[int]]:
    """Deal rollouts into shares with nearly equal numbers of tokens to compute; a shared prompt counts once.

    Groups stay whole if no finer division makes the largest share smaller. `homes` is the share in which each rollout
    already is.
    """
    groups = rollouts.groups(numbers)
    best: list[list[int]] = [[] for _ in range(num_shares)]
    least = float("inf")
    pieces = 1
    while pieces < 2 * max(map(len, groups), default=0):
        units = [unit for group in groups for place in range(pieces) if (unit := group[place::pieces])]
        sizes = [_tokens_to_compute(rollouts, unit) for unit in units]
        nearest = [Counter(homes[unit].tolist()).most_common(1)[0][0] for unit in units]
        shares = [[n for item in share for n in units[item]] for share in deal_near_home(sizes, nearest, num_shares)]
        most = max(_tokens_to_compute(rollouts, share) for share in shares)
        if most < least:
            best, least = shares, most
        pieces *= 2
    return best


def _tokens_to_compute(rollouts: RolloutBatch, numbers: Sequence[int]) -> int:
    first_of_prompt = {int(rollouts.prompt_ids[number]): number for number in numbers}
    prompts = int(rollouts.prompt_lengths[list(first_of_prompt.values())].sum())
    return prompts + int((rollouts.lengths - rollouts.prompt_lengths)[list(numbers)].sum())
