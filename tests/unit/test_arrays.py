"""What travels between ranks: rows to the ranks that want them, columns and sums to all, large tensors in parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from specrl.distributed import Ragged, Ranks, Route, deliver, gather_columns, join, leave, sum_arrays
from specrl.rollout.bubbles.texts import PregeneratedText, deliver_texts
from specrl.schemas import Rollout
from specrl.training.rollouts import RolloutBatch
from specrl.training.shares import TrainingShares

LENGTHS = [5, 0, 3, 8, 1, 2, 700]
HELD = [[0, 3], [1, 2, 4, 5, 6], []]
WANTED = [[2, 0, 6], [6, 3, 1], [5, 1, 0, 6, 4]]


def row_of(index: int) -> dict[str, np.ndarray]:
    """The tokens of a row, its log-probs, and for each token and each of 2 layers the numbers of 3 experts."""
    generator = np.random.default_rng(index)
    tokens = generator.integers(0, 150_000, LENGTHS[index]).astype(np.int32)
    logprobs = generator.normal(size=LENGTHS[index] // 2).astype(np.float32)
    return {"tokens": tokens, "logprobs": logprobs, "experts": generator.integers(0, 128, (len(tokens), 2, 3))}


def columns_of(rows: list[int]) -> dict[str, Ragged]:
    found = [row_of(row) for row in rows]
    return {
        "tokens": Ragged.of([row["tokens"] for row in found], np.int32),
        "logprobs": Ragged.of([row["logprobs"] for row in found], np.float32),
        "experts": Ragged.of([row["experts"] for row in found], np.int16, (2, 3)),
    }


def route_of(world_size: int) -> Route:
    """The route above, in which rank 2 holds nothing; a rank that is alone holds everything."""
    held = HELD if world_size == 3 else [list(range(len(LENGTHS)))]
    sender = np.zeros(len(LENGTHS), np.int64)
    for rank, rows in enumerate(held):
        sender[rows] = rank
    return Route(sender, [np.array(rows) for rows in WANTED[:world_size]], [np.array(rows, int) for rows in held])


def check_delivery(ranks: Ranks) -> None:
    route = route_of(ranks.world_size)
    found = deliver(ranks, columns_of(route.held[ranks.rank].tolist()), route)
    wanted = route.wanted[ranks.rank].tolist()
    assert all(row.dtype == np.int16 for row in found["experts"])
    assert all(row.dtype == np.int32 for row in found["tokens"])
    for position, row in enumerate(wanted):
        for name, expected in row_of(row).items():
            np.testing.assert_array_equal(found[name][position], expected)


def rollouts_of(engine: int) -> list[Rollout]:
    """Three responses of an engine to prompts 5 and 4, of which engine 1 answers the second."""
    numbers = [(5, 1), (5, 0), (9, 0)] if engine == 0 else [(4, 0)]
    return [
        Rollout(0, engine, prompt, sample, 0, 0, 0, [prompt], [prompt, sample] * 2, [-0.5] * 4, "text", "", "stop")
        for prompt, sample in numbers
    ]


def check_rollouts(ranks: Ranks) -> None:
    """Numbers of all rollouts reach everyone; tokens go to the ranks that train on them."""
    rollouts = rollouts_of(ranks.rank) if ranks.rank < 2 else []
    for rollout in rollouts:
        rollout.reward = rollout.prompt_id + rollout.sample / 3
    batch = RolloutBatch.gather(ranks, rollouts, prompt_places={4: 0, 5: 1, 9: 2})
    assert batch.prompt_ids.tolist() == [4, 5, 5, 9] and batch.samples.tolist() == [0, 0, 1, 0]
    assert batch.engines.tolist() == [1, 0, 0, 0] and batch.response_lengths.tolist() == [4] * 4
    assert batch.rewards.tolist() == [4, 5, 5 + 1 / 3, 9]
    assert list(batch.held) == [[1, 2, 3], [0], []][ranks.rank]
    assert all(batch.prompt_ids[number] == rollout.prompt_id for number, rollout in batch.held.items())
    policy: Any = SimpleNamespace(dp_rank=ranks.rank, dp_size=3, tp_rank=0, pp_rank=0, pp_size=1, ranks=ranks)
    shares = TrainingShares.of(policy, batch, [[0, 1, 2, 3]])
    own = shares.deliver(batch)
    trained = dict(enumerate(shares.dealt[0]))
    assert [len(trained[rank]) for rank in range(3)] == [2, 1, 1]
    for number in trained[ranks.rank]:
        prompt, sample = int(batch.prompt_ids[number]), int(batch.samples[number])
        assert np.asarray(own[number].tokens).tolist() == [prompt, prompt, sample, prompt, sample]
        assert own[number].generation_logprobs.tolist() == [-0.5] * 4
    found = {number: np.full(4, -number, np.float32) for number in trained[ranks.rank]}
    shares.return_logprobs(batch, found)
    assert all(list(rollout.policy_logprobs or ()) == [-number] * 4 for number, rollout in batch.held.items())


def check_texts(ranks: Ranks) -> None:
    """A text goes only to the rank that has its seed next, or else to those that answer its prompt."""
    made = [PregeneratedText(prompt, 2**62 + ranks.rank, [prompt] * ranks.rank) for prompt in (6, 7, 8, 9)]
    readers: list[set[int]] = [{7, 9}, {8, 9}, set()]
    found = deliver_texts(ranks, made, {2**62 + 2: 1}, readers, engine_size=1)
    prompts = sorted(readers[ranks.rank])
    expected = [PregeneratedText(p, 2**62 + rank, [p] * rank) for rank in range(2) for p in prompts]
    assert found == expected + (
        [PregeneratedText(p, 2**62 + 2, [p] * 2) for p in (6, 7, 8, 9)] if ranks.rank == 1 else []
    )


def run_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=3)
    ranks = join()
    check_delivery(ranks)
    own = {"length": np.arange(rank, dtype=np.int32), "reward": np.full(rank, rank / 3)}
    columns, origin = gather_columns(ranks, own)
    assert origin.tolist() == [1, 2, 2]
    assert columns["length"].tolist() == [0, 0, 1] and columns["length"].dtype == np.int32
    assert columns["reward"].tolist() == [1 / 3, 2 / 3, 2 / 3]
    assert sum_arrays(ranks, np.array([0.5, float(rank)])).tolist() == [1.5, 3.0]
    check_rollouts(ranks)
    check_texts(ranks)
    (folder / f"{rank}.done").touch()
    leave()


def test_ranks_get_the_rows_and_tensors_that_they_want_and_sums_of_all(tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(tmp_path,), nprocs=3)  # type: ignore[no-untyped-call]
    assert len(list(tmp_path.glob("*.done"))) == 3


def test_a_rank_that_is_alone_has_what_it_wants() -> None:
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    check_delivery(ranks)
    columns, origin = gather_columns(ranks, {"reward": np.array([0.1, 0.2])})
    assert columns["reward"].tolist() == [0.1, 0.2] and origin.tolist() == [0, 0]


def test_no_row_is_sent_to_a_rank_that_holds_it_or_does_not_want_it() -> None:
    route = route_of(3)
    sent = {(a, b): route.wanted[b][route.messages(a, b)].tolist() for a in range(3) for b in range(3) if a != b}
    assert sent == {(0, 1): [3], (0, 2): [0], (1, 0): [2, 6], (1, 2): [5, 1, 6, 4], (2, 0): [], (2, 1): []}
    copies = Route(route.sender, route.wanted, [*route.held[:2], np.array([1, 5])])  # as ranks of one engine hold
    assert copies.wanted[2][copies.messages(1, 2)].tolist() == [6, 4]
