"""Spot training on two ranks that had different amounts of idle time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from specrl.distributed import join, leave
from specrl.processes import free_port
from specrl.training.drafter.spot import SpotTraining
from specrl.training.features import padded, sequences
from tests.unit.test_drafter import ALONE, make_drafter, make_features, write_policy

LENGTHS = [(3, 9), (2, 1), (5, 20), (4, 6)]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def test_sequences_come_apart_and_together_without_seeing_each_other(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir)
    features = make_features(drafter, LENGTHS)
    rows = sequences(features)
    assert [row.tokens.shape[1] for row in rows] == [12, 25, 10]  # one token is nothing to draft
    batches = [drafter._pack(item) for item in (padded(rows), *rows)]
    together, *apart = [drafter._step(batch, 0.0, measure=True)[1] for batch in batches]
    torch.testing.assert_close(together, sum(apart), rtol=1e-5, atol=1e-5)


def test_an_even_sample_of_the_responses_is_trained_on_and_micro_steps_stay_small(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, max_tokens_per_step=40)
    spot = SpotTraining(drafter)
    assert not spot.work(lambda: False)
    for seed in range(4):
        spot.remember([make_features(drafter, LENGTHS, seed), None])
    kept = [sorted(row.tokens.shape[1] for batch in spot._micro_batches() for row in batch) for _ in range(40)]
    assert all(sum(lengths) <= 40 for lengths in kept)
    assert {length for lengths in kept for length in lengths} == {10, 12, 25}
    assert spot.work(lambda: False)
    assert spot.micro_steps == 1


def test_training_alone_learns(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, online_lr=3e-3)
    spot = SpotTraining(drafter)
    losses = []
    for _ in range(20):
        spot.remember([make_features(drafter, LENGTHS)])
        for _ in range(4):
            spot.work(lambda: False)
        losses.append(spot.merge()["loss"])
    assert losses[-1] < 0.7 * losses[0]
    assert spot.merge() == {}


def test_passes_through_the_same_responses_move_the_drafter_less_and_less(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, online_lr=6e-3)
    spot = SpotTraining(drafter)
    spot.remember([make_features(drafter, LENGTHS[:1])])
    rates = []
    for _ in range(3):
        spot.work(lambda: False)
        rates.append(drafter.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([6e-3, 3e-3, 2e-3])
    spot.remember([make_features(drafter, LENGTHS[:1], seed=1)])
    spot.work(lambda: False)
    assert drafter.optimizer.param_groups[0]["lr"] == 6e-3


def run_rank(number: int, policy_dir: Path, port: int, results: Path) -> None:
    os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number), MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    ranks = join()
    drafter = make_drafter(policy_dir, ranks, online_lr=1e-3)
    spot = SpotTraining(drafter)
    spot.remember([make_features(drafter, LENGTHS, seed=number)])
    for _ in range((1, 3)[number]):
        spot.work(lambda: False)
    alone = [parameter.detach().clone() for parameter in drafter.model.parameters()]
    metrics = spot.merge()
    merged = [parameter.detach().clone() for parameter in drafter.model.parameters()]
    nothing = spot.merge()
    spot.micro_steps, steps = number, drafter.optimizer.state_dict()["state"][0]["step"].item()
    spot.merge()  # only the second rank's counts
    last = [parameter.detach().clone() for parameter in drafter.model.parameters()]
    torch.save((alone, merged, metrics, nothing, steps, last), results / f"{number}.pt")
    leave()


def test_the_merge_weighs_ranks_by_their_micro_steps(policy_dir: Path, tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(policy_dir, free_port(), tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    first, second = (torch.load(tmp_path / f"{number}.pt") for number in range(2))
    for a, b, merged, same in zip(first[0], second[0], first[1], second[1], strict=True):
        torch.testing.assert_close(merged, 0.25 * a + 0.75 * b)
        assert torch.equal(merged, same)
    assert first[2] == second[2] and first[2]["loss"] > 0
    assert first[3] == second[3] == {}
    assert first[4] == second[4] == 3
    assert all(torch.equal(a, b) for a, b in zip(first[5], second[5], strict=True))


def test_alone_the_merge_changes_nothing(policy_dir: Path) -> None:
    drafter = make_drafter(policy_dir, ALONE, online_lr=1e-3)
    spot = SpotTraining(drafter)
    spot.remember([make_features(drafter, LENGTHS)])
    spot.work(lambda: False)
    before = [parameter.detach().clone() for parameter in drafter.model.parameters()]
    spot.merge()
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.model.parameters(), strict=True))
