"""One rank of `specrl bench exchange`: `python -m specrl.bench.exchange.one_rank SETTINGS.json WAY FOLDER PARENT`."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d

from specrl.artifacts import write_json
from specrl.bench.exchange import pickled
from specrl.bench.settings import ExchangeSettings
from specrl.distributed import Ranks, join, leave
from specrl.precision.mismatch import MismatchSums
from specrl.processes import end_with_parent
from specrl.schemas import Rollout, as_array
from specrl.training.rollouts import RolloutBatch
from specrl.training.shares import TrainingShares

ARRAYS, PICKLED = "arrays", "pickled"
"""The two ways in which rollouts travel."""
SAMPLES = 8
"""The number of responses to a prompt."""
PROMPT_TOKENS, VOCAB_SIZE, TEXT_PER_TOKEN = 256, 150_000, "text"
"""The tokens of a prompt, the size of the vocabulary, and the text of a token."""


@dataclass
class Cost:
    """What a rank spent in the parts of the exchange."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By part: the time from when all ranks were ready until this one was done."""
    received: dict[str, int] = field(default_factory=dict)
    """By part: the bytes that came from other ranks."""
    peak: int = 0
    """The growth of the process's peak memory over what the synthetic rollouts take, in bytes."""
    found: dict[str, float] = field(default_factory=dict)
    """The disagreement of the engines, to see that both ways compute the same."""


@dataclass
class DataParallelPlace:
    """The place of a rank in a policy that is not divided."""

    ranks: Ranks
    dp_rank: int
    dp_size: int
    tp_rank: int = 0
    pp_rank: int = 0
    pp_size: int = 1


class ReceivedBytes:
    """Counts what this rank receives from others through the collectives that either way uses."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Let the functions of torch.distributed count; they stay that way for the rest of the process."""
        all_gather, irecv, all_reduce = distributed_c10d.all_gather, dist.irecv, dist.all_reduce

        def counting_gather(parts: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += (len(parts) - 1) * own.numel() * own.element_size()
            return all_gather(parts, own, *args, **kwargs)

        def counting_receive(part: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += part.numel() * part.element_size()
            return irecv(part, *args, **kwargs)

        def counting_reduce(values: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += values.numel() * values.element_size()
            return all_reduce(values, *args, **kwargs)

        counting = {"all_gather": counting_gather, "irecv": counting_receive, "all_reduce": counting_reduce}
        for name, function in counting.items():
            setattr(dist, name, function)
            setattr(distributed_c10d, name, function)  # by which all_gather_object finds it


class Meter:
    """Measures the parts of one way."""

    def __init__(self, ranks: Ranks) -> None:
        self.cost = Cost()
        self._ranks, self._bytes = ranks, ReceivedBytes()
        self._bytes.install()
        self._before = peak_bytes()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure a part, which begins when every rank is ready."""
        self._ranks.barrier()
        before, started = self._bytes.count, time.perf_counter()
        yield
        self.cost.seconds[part] = time.perf_counter() - started
        self.cost.received[part] = self._bytes.count - before
        self.cost.peak = peak_bytes() - self._before


def peak_bytes() -> int:
    """Return the largest memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synthetic(settings: ExchangeSettings, ranks: Ranks) -> list[Rollout]:
    """Return this rank's share of random rollouts, of normally distributed lengths."""
    generator = np.random.default_rng(ranks.rank)
    count = settings.responses // ranks.world_size
    lengths = generator.normal(settings.tokens, settings.spread * settings.tokens, count).clip(1).astype(int)
    found = []
    for index, length in enumerate(lengths.tolist()):
        tokens = as_array("i", generator.integers(0, VOCAB_SIZE, length).astype(np.int32))
        logprobs = as_array("f", -generator.exponential(1.0, length).astype(np.float32))
        prompt_id = ranks.rank * count + index // SAMPLES
        prompt = generator.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()
        place = (0, ranks.rank, prompt_id, index % SAMPLES, 0, 0, 0, prompt)
        reward = float(index % 2)
        found.append(Rollout(*place, tokens, logprobs, TEXT_PER_TOKEN * length, "", "stop", reward=reward))
    return found


def trained_logprobs(rollouts_tokens: np.ndarray[Any, Any], generated: np.ndarray[Any, Any]) -> Any:
    """Return made-up log-probs of the trainer, near the engine's and decided by the tokens."""
    return generated + np.float32(1e-3) * (rollouts_tokens % 7 - 3).astype(np.float32)


def run_arrays(settings: ExchangeSettings, ranks: Ranks) -> Cost:
    """Exchange rollouts as training does."""
    own = synthetic(settings, ranks)
    meter = Meter(ranks)
    with meter("rollouts"):
        places = {prompt: prompt for prompt in range(settings.responses)}
        batch = RolloutBatch.gather(ranks, own, prompt_places=places)
        place = DataParallelPlace(ranks, ranks.rank, ranks.world_size)
        shares = TrainingShares.of(place, batch, [list(range(len(batch)))])
        trained = shares.deliver(batch)
    rows = {
        number: trained_logprobs(trained.row("response", number), trained.row("generation_logprobs", number))
        for number in shares.own(0)
    }
    with meter("log-probs"):
        shares.return_logprobs(batch, rows)
    with meter("mismatch"):
        sums = MismatchSums.nothing()
        for number, row in rows.items():
            sums += MismatchSums.of(row, trained.row("generation_logprobs", number))
        sums = sums.over(ranks)
    meter.cost.found = sums.metrics()
    return meter.cost


def run_pickled(settings: ExchangeSettings, ranks: Ranks) -> Cost:
    """Exchange rollouts as pickled lists."""
    own = [pickled.ListRollout.of(rollout) for rollout in synthetic(settings, ranks)]
    meter = Meter(ranks)
    with meter("rollouts"):
        everyone = pickled.exchange_rollouts(ranks, own)
    rows = {}
    for index in range(ranks.rank, len(everyone), ranks.world_size):
        tokens = np.asarray(everyone[index].response_tokens)
        generated = np.asarray(everyone[index].generation_logprobs, np.float32)
        rows[index] = trained_logprobs(tokens, generated).tolist()
    with meter("log-probs"):
        pickled.exchange_logprobs(ranks, everyone, rows)
    with meter("mismatch"):
        meter.cost.found = pickled.compare_engines(everyone)
    return meter.cost


WAYS: dict[str, Callable[[ExchangeSettings, Ranks], Cost]] = {ARRAYS: run_arrays, PICKLED: run_pickled}


def main(settings_path: Path, way: str, folder: Path, parent: int) -> None:
    """Measure one way as one rank, write its cost as JSON, and end with the parent process."""
    end_with_parent(parent)
    settings = ExchangeSettings.model_validate(json.loads(settings_path.read_text()))
    ranks = join()
    cost = WAYS[way](settings, ranks)
    write_json(folder / f"{way}-{ranks.rank}.json", asdict(cost))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
