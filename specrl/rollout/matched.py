"""Matched pairs: plain and speculative generation of the same tokens in turn, on one engine with the same weights.

Beside them, vLLM as it comes may generate as many tokens after the same prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

from torch.distributed.distributed_c10d import PrefixStore

from specrl.artifacts import DefaultSpeed, SpeedPair
from specrl.config import Config
from specrl.distributed import Ranks
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Generation, Request
from specrl.rollout.vllm.default_engine import DefaultEngine, DefaultEngineError, GpuShare

logger = logging.getLogger(__name__)

LOG_FILE = "default-engine.log"
"""The file in the stage's folder with what vLLM's default engine prints."""
LONGEST_TURN = timedelta(days=7)
"""How long the other ranks wait for a turn of the default engine at most; the time limit of the job is shorter."""
Run = list[Generation]
"""One generation of all requests, batch by batch."""


class DefaultTurns:
    """The turns of vLLM's default engine, which the first rank has; meanwhile all ranks' own engines wait or sleep.

    A default engine that fails is no error of the stage: it leaves a warning, and no figures.
    """

    def __init__(self, engine: Engine, ranks: Ranks, config: Config, policy_dir: Path, stage_dir: Path) -> None:
        """Start the default engine (collective)."""
        self._engine, self._ranks = engine, ranks
        self._default: DefaultEngine | None = None
        self._num_turns = 0
        self._begin()
        if ranks.is_first:
            try:
                gpu = GpuShare.beside(config, ranks.local_rank, alone=True)
                self._default = DefaultEngine(policy_dir, config, stage_dir / LOG_FILE, gpu=gpu)
                logger.info("vLLM's default engine: %s", self._default.facts)
            except DefaultEngineError as error:
                logger.warning("no figures of vLLM as it comes: %s", error)
        self._end()

    def rate(self, requests: list[Request], run: Run, batch: int) -> float | None:
        """Generate as many tokens after each prompt as `run` has, and return how many there were per second.

        It is collective.

        Returns:
            None on ranks without a default engine.
        """
        self._begin()
        lengths = [len(response.tokens) for part in run for response in part.responses]
        seconds = None
        if self._default is not None:
            try:
                self._default.wake()
                seconds = sum(self._default.generate(requests, lengths, batch))
            except DefaultEngineError as error:
                logger.warning("no more figures of vLLM as it comes: %s", error)
                self._default = None
        self._end()
        return None if seconds is None else sum(lengths) / seconds

    def shutdown(self) -> None:
        """End the default engine."""
        if self._default is not None:
            self._default.shutdown()

    def _begin(self) -> None:
        if self._engine.can_sleep:
            self._engine.sleep()
        self._ranks.barrier()

    def _end(self) -> None:
        if self._engine.can_sleep and self._default is not None:
            try:
                self._default.sleep()
            except DefaultEngineError as error:
                logger.warning("no more figures of vLLM as it comes: %s", error)
                self._default = None
        self._wait_for_first()
        if self._engine.can_sleep:
            self._engine.wake()

    def _wait_for_first(self) -> None:
        """Wait until the first rank has ended its turn, which may take longer than a collective may."""
        if self._ranks.world_size == 1:
            return
        self._num_turns += 1
        store, turn = PrefixStore("specrl/default-turns", self._ranks.store()), str(self._num_turns)
        if self._ranks.is_first:
            store.set(turn, "ended")
        else:
            store.wait([turn], LONGEST_TURN)


def matched_pair(
    engine: Engine,
    requests: list[Request],
    batch: int,
    k: int | None,
    repeats: int,
    turns: DefaultTurns | None = None,
    give_texts: Callable[[], None] | None = None,
) -> SpeedPair:
    """Generate all requests, `batch` at a time, plain and with `k` draft tokens in turn, `repeats` times each.

    Invariant 1 makes both the same work: the same seeds give the same tokens. Which of the two goes first alternates,
    so that a machine that slows down or speeds up favours neither.

    Args:
        batch: The number of requests that are handed to the engine at a time.
        k: The draft length; None leaves the choice to the engine's cost model. The
            engine is left with this setting.
        repeats: The number of generations of each kind.
        turns: The turns of vLLM's default engine, which has one at the end of each repeat.
        give_texts: A function that gives the engine all text to begin with. It is called before each speculative
            repeat, and none of its time counts; the repeat then draws on what it has generated itself, too, as the
            rollouts of a step do. Without it no earlier response is drafted from.
    """
    runs: dict[int | None, list[Run]] = {0: [], k: []}
    default: list[float | None] = []
    for repeat in range(repeats):
        for length in (0, k) if repeat % 2 == 0 else (k, 0):
            engine.set_k(length)
            engine.reset_prefix_cache()
            recall = give_texts is not None and length != 0
            if give_texts is not None and recall:
                give_texts()
            parts = [requests[i : i + batch] for i in range(0, len(requests), batch)]
            runs[length].append([engine.generate(part, recall=recall) for part in parts])
        if turns is not None:
            default.append(turns.rate(requests, runs[0][-1], batch))
    engine.set_k(k)
    plain, speculative = [_rate(run) for run in runs[0]], [_rate(run) for run in runs[k]]
    ratios = [fast / slow for slow, fast in zip(plain, speculative, strict=True)]
    plain_steps = _decode_steps(runs[0][0])  # none where every response is a single token
    return SpeedPair(
        batch=batch,
        plain_tokens_per_s=median(plain),
        speculative_tokens_per_s=median(speculative),
        speedup=median(ratios),
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        decode_step_reduction=1 - _decode_steps(runs[k][0]) / plain_steps if plain_steps else 0.0,
        tokens_equal=_share_equal(runs[0], runs[k]),
        token_share=_token_share(runs[k]),
        default=_against_default(plain, speculative, default),
    )


def _against_default(plain: list[float], speculative: list[float], default: list[float | None]) -> DefaultSpeed | None:
    """Return the rates of the engine over those of the default engine in the same repeats; None without any."""
    rows = [(a, b, c) for a, b, c in zip(plain, speculative, default, strict=False) if c is not None]
    if not rows:
        return None
    ratios = [fast / slow for _, fast, slow in rows]
    return DefaultSpeed(
        tokens_per_s=median(slow for *_, slow in rows),
        speedup=median(ratios),
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        plain_ratio=median(own / slow for own, _, slow in rows),
    )


def _rate(run: Run) -> float:
    return sum(part.num_tokens for part in run) / sum(part.seconds for part in run)


def _decode_steps(run: Run) -> int:
    return sum(part.stats.decode_steps for part in run)


def _token_share(runs: Sequence[Run]) -> dict[str, float]:
    """Return the share of all tokens that were drafted by each source and accepted."""
    parts = [part for run in runs for part in run]
    by_source = SpeculationStats.merge(part.stats for part in parts).by_source
    num_tokens = sum(part.num_tokens for part in parts)
    return {source: counts.num_accepted_tokens / num_tokens for source, counts in by_source.items()}


def _share_equal(left: Sequence[Run], right: Sequence[Run]) -> float:
    """Return the share of the responses, those of all repeats, that are the same on both sides."""
    plain, other = (
        [answer.tokens for run in runs for part in run for answer in part.responses] for runs in (left, right)
    )
    return sum(a == b for a, b in zip(plain, other, strict=True)) / len(plain)
