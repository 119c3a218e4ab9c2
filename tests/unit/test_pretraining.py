"""Pretraining in windows: the same drafter as from all features at once, with no more of them held than allowed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specrl import lifetime
from specrl.artifacts import PrepareResult, write_result
from specrl.config import DrafterConfig, PolicyConfig, parse_config
from specrl.context import StageContext
from specrl.distributed import Ranks, join, leave
from specrl.lifetime import LeftJobError, Lifetime, Stop
from specrl.processes import free_port
from specrl.progress import Progress
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.stages.pretrain import answer_prompts, pretrain_drafter
from specrl.tracking.tracker import Tracker
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.drafter.drafters import pretrain, windows
from specrl.training.drafter.resume import TrainingCheckpoints
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features, Window
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.sample import feature_area
from tests.unit.test_drafter import VOCAB, assert_equal_state, make_drafter, write_policy

# isort: split
from megatron.core import parallel_state

WINDOW = 150


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is sure of what comes next, so that there is something to foresee."""
    directory = write_policy(tmp_path_factory.mktemp("policy"))
    model = LlamaForCausalLM.from_pretrained(directory)
    model.lm_head.weight.data.mul_(40)
    model.save_pretrained(directory)
    return directory


class Counted(Policy):
    """A frozen policy that remembers how many padded tokens each of its forward passes had."""

    def __init__(self, policy_dir: Path, ranks: Ranks) -> None:
        super().__init__(policy_dir, PolicyConfig(), dtype="float32", ranks=ranks, seed=0, trainable=False)
        self.areas: list[int] = []

    def forward_features(
        self, micro_batches: list[MicroBatch], layers: tuple[int, ...], windows: Mapping[int, Window] | None = None
    ) -> list[Features]:
        self.areas.append(sum(feature_area(batch) for batch in micro_batches))
        return super().forward_features(micro_batches, layers, windows)


def batches(count: int = 24) -> list[MicroBatch]:
    """Of lengths from 6 to 18, a few to a micro-batch."""
    rows = [[(start + 3 * step) % VOCAB for step in range(6 + start % 13)] for start in range(count)]
    return pack([TokenSequence(row, 2, index) for index, row in enumerate(rows)], 50)


def trained(policy: Counted, policy_dir: Path, window: int, own: list[MicroBatch]) -> tuple[dict[str, float], Drafter]:
    drafter = make_drafter(policy_dir, policy.ranks, max_tokens_per_window=window, epochs=6, lr=3e-3)
    policy.areas.clear()
    return pretrain(policy, drafter, own, drafter.config), drafter


def test_windows_give_the_drafter_that_all_features_give(policy_dir: Path, ranks: Ranks) -> None:
    policy, own = Counted(policy_dir, ranks), batches()
    total = sum(feature_area(batch) for batch in own)
    expected, at_once = trained(policy, policy_dir, total, own)
    assert policy.areas == [total]
    for _ in range(2):
        metrics, drafter = trained(policy, policy_dir, WINDOW, own)
        assert metrics == expected
        assert_equal_state(drafter.state_dict(), at_once.state_dict())
        assert max(policy.areas) <= WINDOW
        assert len(policy.areas) >= 2 * 6 and sum(policy.areas) == 6 * total
    untrained = make_drafter(policy_dir, ranks)
    before = untrained.update(policy.forward_features(own, untrained.feature_layers), lr=0.0)
    assert expected["loss"] < 0.8 * before["loss"]


def test_progress_counts_the_steps_of_all_epochs(policy_dir: Path, ranks: Ranks) -> None:
    policy, own = Counted(policy_dir, ranks), batches()
    drafter = make_drafter(policy_dir, ranks, max_tokens_per_window=WINDOW, epochs=2)
    told: list[tuple[int, int]] = []
    pretrain(policy, drafter, own, drafter.config, lambda done, total: told.append((done, total)))
    assert told == [(step + 1, 2 * len(own)) for step in range(2 * len(own))]


@pytest.mark.parametrize("window", [10**6, WINDOW])
def test_no_epochs_measure_a_drafter_and_leave_it_as_it_is(policy_dir: Path, ranks: Ranks, window: int) -> None:
    policy, own = Counted(policy_dir, ranks), batches()
    drafter, config = make_drafter(policy_dir, ranks), DrafterConfig(epochs=0, max_tokens_per_window=window)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    metrics = pretrain(policy, drafter, own, config)
    assert metrics["num_tokens"] > 0 and metrics["acceptance_length"] >= 1
    assert_equal_state(drafter.state_dict(), before)


class KilledError(Exception):
    """The process was killed."""


@pytest.mark.parametrize("window", [10**6, WINDOW])
def test_an_interrupted_training_goes_on_to_the_bit(
    policy_dir: Path, ranks: Ranks, tmp_path: Path, window: int
) -> None:
    """Left once on request, and killed once in the middle of the last epoch, with a step that is done again."""
    policy, own = Counted(policy_dir, ranks), batches()
    expected, straight = trained(policy, policy_dir, window, own)
    steps: list[int] = []

    def job(kill_after: int | None = None, leave_after: int | None = None) -> tuple[dict[str, float], Drafter]:
        lifetime = Lifetime()

        def on_progress(done: int, total: int) -> None:
            steps.append(done)
            if done == leave_after:
                lifetime.ask_to_leave(Stop("walltime", "the test"))
            if done == kill_after:
                raise KilledError

        checkpoints = TrainingCheckpoints(tmp_path, own, ranks, lifetime, seconds=0 if kill_after else 10**6)
        drafter = make_drafter(policy_dir, ranks, max_tokens_per_window=window, epochs=6, lr=3e-3)
        metrics = pretrain(policy, drafter, own, drafter.config, on_progress, checkpoints)
        checkpoints.finish()
        return metrics, drafter

    with pytest.raises(LeftJobError, match="the test"):
        job(leave_after=5)
    [left] = tmp_path.glob("*")
    last = 6 * len(own) - 3
    with pytest.raises(KilledError):
        job(kill_after=last)
    assert left not in tmp_path.glob("*") and len(list(tmp_path.glob("*"))) == 1
    assert TrainingCheckpoints(tmp_path, own[1:], ranks, Lifetime()).restore() is None
    metrics, drafter = job()
    assert metrics == expected
    assert_equal_state(drafter.state_dict(), straight.state_dict())
    # A request is heard in the step after it.
    assert steps == [*range(1, 7), *range(7, last + 1), *range(last, 6 * len(own) + 1)]
    assert not tmp_path.exists()


def test_the_stage_goes_on_with_its_responses_and_in_the_middle_of_the_training(
    policy_dir: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine is started: the policy's directory has not even a tokenizer."""
    monkeypatch.chdir(tmp_path)
    write_result(tmp_path / "prepare", PrepareResult(policy_dir=policy_dir, seconds=1))
    sections = {"name": "run", "model": {"dtype": "float32"}, "drafter": {"draft_vocab_size": 16, "epochs": 3}}
    config = parse_config({**sections, "speculation": {"method": "eagle3"}})
    responses = [[(start + 3 * step) % VOCAB for step in range(20 + start % 13)] for start in range(60)]
    rows = [
        Rollout(0, 0, 0, i, 0, 0, 0, [1, 2], row, [0.0] * len(row), "", "", "stop") for i, row in enumerate(responses)
    ]

    class Leaving(Progress):
        """Asks to leave in the middle of the training."""

        def update(self, done: float, total: float, **words: str) -> None:
            if words["phase"] == "training the drafter" and done == 4:
                lifetime.current().ask_to_leave(Stop("walltime", "the test"))

    def job(name: str, kind: type[Progress]) -> dict[str, float]:
        lifetime.set_current(Lifetime())
        context = StageContext(config, "pretrain", name, tmp_path / name, {"prepare": tmp_path / "prepare"}, "")
        progress = kind(context.stage_dir, enabled=False)
        found = RolloutBatch.gather(ranks, answer_prompts(context, ranks, context.stage_dir / "rollouts", progress))
        return pretrain_drafter(context, ranks, found, context.stage_dir / "drafter", Tracker(), progress)

    for name in ("straight", "left"):
        write_rollouts(rollout_path(tmp_path / name / "rollouts", 0, 0), rows)
    expected = job("straight", Progress)
    with pytest.raises(LeftJobError):
        job("left", Leaving)
    assert len(list((tmp_path / "left" / "training").iterdir())) == 1 and lifetime.current().last_step == 0
    assert not (tmp_path / "left" / "drafter").exists()
    assert job("left", Progress) == expected
    files = [load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("straight", "left")]
    assert_equal_state(*files)
    assert sorted(path.name for path in (tmp_path / "left").iterdir()) == ["drafter", "rollouts"]


def test_padded_lengths_are_what_the_policy_asks_for(
    policy_dir: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sequence parallelism, which comes with tensor parallelism, they are divided among the ranks."""
    write_result(tmp_path / "prepare", PrepareResult(policy_dir=policy_dir, seconds=1))
    config = parse_config({"name": "run", "model": {"dtype": "float32"}, "speculation": {"method": "eagle3"}})
    context = StageContext(config, "pretrain", "name", tmp_path / "name", {"prepare": tmp_path / "prepare"}, "")
    rows = [Rollout(0, 0, 0, i, 0, 0, 0, [1, 2], [3] * (i + 1), [0.0] * (i + 1), "", "", "stop") for i in range(9)]
    widths: list[int] = []

    def noted(policy: Policy, drafter: Drafter, own: list[MicroBatch], *_: Any) -> dict[str, float]:
        widths.extend(len(batch.tokens) for batch in own)
        return {}

    monkeypatch.setattr(Policy, "pad_multiple", 4)
    monkeypatch.setattr("specrl.stages.pretrain.pretrain", noted)
    monkeypatch.setattr("specrl.stages.pretrain.save_drafter", lambda *_, **__: None)
    progress = Progress(context.stage_dir, enabled=False)
    pretrain_drafter(context, ranks, RolloutBatch.gather(ranks, rows), tmp_path / "drafter", Tracker(), progress)
    assert widths and {width % 4 for width in widths} == {0}


def test_responses_that_more_engines_have_shared_out_are_generated_anew(
    policy_dir: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config({"name": "run", "speculation": {"method": "eagle3"}})
    context = StageContext(config, "pretrain", "name", tmp_path, {"prepare": tmp_path / "prepare"}, "")
    rows = [Rollout(0, 0, i, 0, 0, 0, 0, [1, 2], [3], [0.0], "", "", "stop") for i in range(4)]
    for rank in range(2):
        write_rollouts(rollout_path(tmp_path / "rollouts", 0, rank), rows[rank::2])
    calls: list[int] = []

    def generated(*_: object) -> list[Rollout]:
        calls.append(len(calls))
        return rows

    monkeypatch.setattr("specrl.stages.pretrain.generate", generated)
    for _ in range(2):
        found = answer_prompts(context, ranks, tmp_path / "rollouts", Progress(tmp_path, enabled=False))
        assert [rollout.prompt_id for rollout in found] == [0, 1, 2, 3]
    assert calls == [0]
    assert [path.name for path in (tmp_path / "rollouts").rglob("rank-*.arrow")] == ["rank-0000.arrow"]


AREAS = st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=1, max_size=3)


@given(AREAS, st.integers(1, 100))
def test_windows_are_the_steps_in_order_and_bounded_on_every_rank(areas: list[list[int]], max_tokens: int) -> None:
    found = windows(areas, max_tokens)
    assert [step for window in found for step in window] == list(range(max(len(own) for own in areas)))
    assert all(
        len(window) == 1 or sum(own[window.start : window.stop]) <= max_tokens for window in found for own in areas
    )
    for window, after in pairwise(found):  # none could have been longer
        assert any(sum(own[window.start : after.start + 1]) > max_tokens for own in areas)


def train_rank(rank: int, policy_dir: Path, out: Path, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    policy = Counted(policy_dir, join())
    own = batches() if rank == 0 else batches(9)
    found: dict[str, Any] = {}
    for name, window in (("once", 10**6), ("windows", WINDOW)):
        metrics, drafter = trained(policy, policy_dir, window, own)
        found[name] = (metrics, drafter.state_dict(), list(policy.areas))
    found["left"] = left_and_resumed(policy, policy_dir, own, out / "training")
    torch.save(found, out / f"rank{rank}.pt")
    leave()


def left_and_resumed(policy: Counted, policy_dir: Path, own: list[MicroBatch], folder: Path) -> Any:
    """What comes of a training that only the second rank asked to leave."""
    for asks in (policy.ranks.rank == 1, False):
        lifetime = Lifetime()
        if asks:
            lifetime.ask_to_leave(Stop("preempted", "the second rank"))
        checkpoints = TrainingCheckpoints(folder, own, policy.ranks, lifetime)
        drafter = make_drafter(policy_dir, policy.ranks, epochs=6, lr=3e-3)
        with suppress(LeftJobError):
            metrics = pretrain(policy, drafter, own, drafter.config, checkpoints=checkpoints)
    return metrics, drafter.state_dict()


def test_ranks_with_more_and_fewer_micro_batches_go_through_the_same_windows(policy_dir: Path, tmp_path: Path) -> None:
    mp.spawn(train_rank, args=(policy_dir, tmp_path, free_port()), nprocs=2)  # type: ignore[no-untyped-call]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for rank in (first, second):
        (expected, state, _), (metrics, found, _) = rank["once"], rank["windows"]
        assert metrics == expected
        assert_equal_state(found, state)
        assert rank["left"][0] == expected
        assert_equal_state(rank["left"][1], state)
    assert [path.name.partition("-")[2] for path in (tmp_path / "training").iterdir()] == ["00000001.safetensors"]
    areas = [rank["windows"][2] for rank in (first, second)]
    assert len(areas[0]) == len(areas[1]) > 6
    assert max(areas[0] + areas[1]) <= WINDOW and 0 in areas[1]
