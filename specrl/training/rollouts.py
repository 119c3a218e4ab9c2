"""The rollouts of a step over all ranks: every rank knows their scalars, but holds only its own tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrl.algorithms.advantages import group_advantages, groups_with_signal
from specrl.config import Config, DataConfig
from specrl.config.algorithms import ADVANTAGES
from specrl.data.rewards.functions import weighted
from specrl.distributed import Ragged, Ranks, Route, deliver, gather_columns
from specrl.schemas import Rollout


@dataclass
class RolloutBatch:
    """A rank's knowledge of the rollouts that all ranks generated; entry i of each array belongs to rollout i.

    Everything but `held` is the same on every rank.
    """

    prompt_ids: NDArray[np.int64]
    samples: NDArray[np.int64]
    engines: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    """The numbers of sampled tokens; an environment's tokens are counted in `environment_lengths`."""
    environment_lengths: NDArray[np.int64]
    num_turns: NDArray[np.int64]
    rewards: NDArray[np.float64]
    reward_parts: dict[str, NDArray[np.float64]]
    """The parts of the rewards by name, before weighting; empty if there are none."""
    truncated: NDArray[np.bool_]
    advantages: NDArray[np.float64]
    """The advantages, 0 until `assign_advantages` has set them."""
    kl: NDArray[np.float64]
    """The sum of the estimates of KL(policy || reference) over each response; 0 unless `train.kl_in` is `reward`."""
    in_loss: NDArray[np.bool_]
    """Whether the loss averages over the rollout's tokens too; `assign_advantages` leaves some rollouts out."""
    engine_size: int
    held: dict[int, Rollout]
    """The rollouts that this rank's engine generated, by number, ascending."""

    @classmethod
    def gather(
        cls,
        ranks: Ranks,
        rollouts: Sequence[Rollout],
        *,
        engine_size: int = 1,
        prompt_places: Mapping[int, int] | None = None,
        data: DataConfig | None = None,
    ) -> RolloutBatch:
        """Gather the scalars of all engines' rollouts (collective); each engine has `engine_size` ranks.

        They are ordered by `prompt_places`, which is by prompt id, or else by rank; an engine's first rank contributes
        its rollouts. With `data`, rewards have the parts of `data.reward`, and what is left out (NaN) becomes the mean
        of its group, which gives no advantage, or 0 if the group has none.
        """
        speaks = ranks.rank % engine_size == 0
        own = rollouts if speaks else []
        names = data.part_names if data is not None else ()
        parts = {name: np.array([(row.reward_parts or {})[name] for row in own], np.float64) for name in names}
        columns, origin = gather_columns(ranks, {**_numbers(own), **{f"part {name}": parts[name] for name in parts}})
        order = np.arange(len(origin))
        if prompt_places is not None:
            places = np.array([prompt_places[prompt] for prompt in columns["prompt_ids"].tolist()], np.int64)
            order = np.lexsort((columns["samples"], places))
        engines = origin[order] // engine_size
        # An engine's rows were gathered in its own order, which `order` then changed.
        gathered = np.flatnonzero(origin // engine_size == ranks.rank // engine_size)
        number_of = np.argsort(order)[gathered]
        held = {int(number): rollout for number, rollout in zip(number_of, rollouts, strict=True)}
        reward_parts = {name: columns.pop(f"part {name}")[order] for name in parts}
        batch = cls(
            **{name: column[order] for name, column in columns.items()},
            reward_parts=reward_parts,
            kl=np.zeros(len(order)),
            in_loss=np.ones(len(order), np.bool_),
            engines=engines,
            engine_size=engine_size,
            held=dict(sorted(held.items())),
        )
        if data is not None and np.isnan(batch.rewards).any():
            batch._fill_left_out(data.part_weights)
        return batch

    def _fill_left_out(self, weights: Sequence[float]) -> None:
        left_out = np.isnan(self.rewards)
        columns = [*self.reward_parts.values()] or [self.rewards]
        for column in columns:
            for prompt in np.unique(self.prompt_ids[np.isnan(column)]):
                group = self.prompt_ids == prompt
                known = column[group & ~np.isnan(column)].tolist()
                mean = known[0] if len({*known}) == 1 else fmean(known or [0.0])  # exact where all are equal
                column[group & np.isnan(column)] = mean
        if self.reward_parts:
            rows = zip(*(column[left_out].tolist() for column in columns), strict=True)
            self.rewards[left_out] = [weighted(weights, row) for row in rows]
        for number, rollout in self.held.items():
            rollout.reward = float(self.rewards[number])
            rollout.reward_parts = {name: float(part[number]) for name, part in self.reward_parts.items()} or None

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.prompt_lengths + self.response_lengths + self.environment_lengths

    def groups(self, numbers: Iterable[int]) -> list[list[int]]:
        """These rollouts, by number, grouped by prompt."""
        found: dict[int, list[int]] = {}
        for number in numbers:
            found.setdefault(int(self.prompt_ids[number]), []).append(number)
        return list(found.values())

    def own(self, ranks: Ranks) -> list[Rollout]:
        return list(self.held.values()) if ranks.rank % self.engine_size == 0 else []

    def with_signal(self, config: Config) -> NDArray[np.int64]:
        """The prompts whose responses differ in reward, or in a part of it if `train.advantage` uses parts."""
        columns = [self.rewards]
        if self.reward_parts and ADVANTAGES.find(config.train.advantage.name).of_parts:
            weighted = zip(config.data.part_weights, self.reward_parts.values(), strict=True)
            columns = [column for weight, column in weighted if weight]
        groups = [groups_with_signal(column.tolist(), self.prompt_ids.tolist()) for column in columns]
        return np.unique(np.array([prompt for found in groups for prompt in found], np.int64))

    def num_missing(self, config: Config) -> int:
        """The number of groups that dynamic sampling would drop and replace by other prompts."""
        return config.train.prompts_per_step - len(self.with_signal(config))

    def penalties(self, config: Config) -> NDArray[np.float64]:
        """The soft overlong punishment of each rollout; an environment's tokens count, as for the limit."""
        longest, window = config.sampling.max_response_tokens, config.train.overlong_window
        return overlong_penalties(self.response_lengths + self.environment_lengths, longest, window)

    def assign_advantages(self, config: Config) -> None:
        """Set the advantage of every rollout from the rewards of its group, the rollouts of the same prompt.

        With dynamic sampling the step's batch consists of the groups with signal and, if they are too few, of the first
        of the dropped groups, which have no signal. Other rollouts have an advantage of 0.

        A KL penalty is only compared with the group's other responses, as in OpenRLHF. Divided by the standard
        deviation of rewards that are equal but for it, rounding would weigh as much as any reward.
        """
        train, in_batch, kl = config.train, np.ones(len(self), np.bool_), self.kl
        rewards = self.rewards + self.penalties(config)
        if train.refill_rounds:
            has_signal = np.isin(self.prompt_ids, self.with_signal(config))
            dropped = list(dict.fromkeys(self.prompt_ids[~has_signal].tolist()))[: self.num_missing(config)]
            in_batch = has_signal | np.isin(self.prompt_ids, dropped)
            rewards, kl = np.where(has_signal, rewards, self.rewards), np.where(has_signal, kl, 0)
        parts = [column[in_batch].tolist() for column in self.reward_parts.values()]
        prompts, weights = self.prompt_ids[in_batch].tolist(), config.data.part_weights
        found = group_advantages(rewards[in_batch].tolist(), prompts, train.advantage, parts, weights)
        penalties = group_advantages((-train.kl_coef * kl[in_batch]).tolist(), prompts, ADVANTAGES.choose("rloo"))
        self.advantages = np.zeros(len(self))
        self.advantages[in_batch] = np.add(found, penalties)
        self.in_loss = in_batch & ~(self.truncated & train.overlong_filter)
        for number, rollout in self.held.items():
            rollout.advantage = float(self.advantages[number])

    def homes(self) -> NDArray[np.int64]:
        """One rank that holds each rollout: an engine's rollouts are assigned to its ranks in turn."""
        found = self.first_ranks()
        for engine in range(int(self.engines.max(initial=-1)) + 1):
            own = self.engines == engine
            found[own] += np.arange(np.count_nonzero(own)) % self.engine_size
        return found

    def first_ranks(self) -> NDArray[np.int64]:
        return self.engines * self.engine_size

    def deliver(
        self, ranks: Ranks, columns: Mapping[str, Ragged], wanted: Sequence[NDArray[np.int64]]
    ) -> dict[str, list[NDArray[Any]]]:
        """Send rows of the rollouts in `held` to the ranks that want them, by rollout number (collective)."""
        held = [np.flatnonzero(self.engines == rank // self.engine_size) for rank in range(ranks.world_size)]
        return deliver(ranks, columns, Route(self.first_ranks(), wanted, held))


def overlong_penalties(lengths: NDArray[np.int64], longest: int, window: float) -> NDArray[np.float64]:
    """The penalty added to the rewards of responses near their length limit (DAPO, arXiv 2503.14476, equation 13).

    It falls linearly from 0 to -1 over the last `window * longest` tokens before `longest`; 0 disables it.
    """
    punished = max(1, round(window * longest))
    return np.clip((longest - punished - lengths) / punished, -1.0, 0.0) if window else np.zeros(len(lengths))


def _numbers(rollouts: Sequence[Rollout]) -> dict[str, NDArray[np.generic]]:
    return {
        "prompt_ids": np.array([rollout.prompt_id for rollout in rollouts], np.int64),
        "samples": np.array([rollout.sample for rollout in rollouts], np.int64),
        "prompt_lengths": np.array([len(rollout.prompt_tokens) for rollout in rollouts], np.int64),
        "response_lengths": np.array([rollout.num_sampled for rollout in rollouts], np.int64),
        "environment_lengths": np.array([sum(rollout.turns[1::2]) for rollout in rollouts], np.int64),
        "num_turns": np.array([max(1, len(rollout.turns[::2])) for rollout in rollouts], np.int64),
        "rewards": np.array([rollout.reward for rollout in rollouts], np.float64),
        "truncated": np.array([rollout.finish_reason == "length" for rollout in rollouts], np.bool_),
        "advantages": np.array([rollout.advantage for rollout in rollouts], np.float64),
    }
