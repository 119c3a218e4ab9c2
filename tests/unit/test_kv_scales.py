"""Scales of an FP8 KV cache: of which tokens they are, and that a run that goes on has those it stopped with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specrl.training.megatron  # noqa: F401  (must precede megatron.core)

# isort: split
import torch
from megatron.core import parallel_state
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specrl.config import Config, PolicyConfig, PrecisionConfig
from specrl.distributed import Ranks, join, leave
from specrl.loop import Trainer
from specrl.models.families import LLAMA
from specrl.precision.kv_scales import KvObserver
from specrl.precision.recipe import KvScales, Recipe
from specrl.rollout.vllm.precision import EnginePrecision
from specrl.step_record import StepRecorder
from specrl.tracking.tracker import Tracker
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.manifest import read_manifest
from specrl.training.megatron.policy import Policy
from specrl.validation.precision import PrecisionMonitor

LAYERS = 2
CALIBRATED = KvScales([0.1, 0.2], [0.3, 0.4], [0.5, 0.6])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield join()
    parallel_state.destroy_model_parallel()
    leave()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return Policy(directory, PolicyConfig(lr=1e-3), dtype="float32", ranks=ranks, seed=0)


def batches(seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 64, (length,), generator=generator).tolist() for length in (20, 17, 9)]
    return pack([TokenSequence(row, 3, index) for index, row in enumerate(rows)], 40)


def mean_loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs[batch.mask].sum() / 40, {}


def scales_of(policy: Policy, ranks: Ranks, *, training_only: bool, run: Any) -> KvScales | None:
    """What an observer saw while `run` ran."""
    observer = KvObserver(policy.model, LAYERS, ranks.device, training_only=training_only)
    policy.kv_observer = observer
    run()
    found = observer.take(ranks)
    observer.detach()
    policy.kv_observer = None
    return found


def test_only_tokens_trained_on_are_measured(policy: Policy, ranks: Ranks) -> None:
    def probe() -> None:
        policy.logprobs(batches(2))

    def step() -> None:
        probe()
        policy.train_step(batches(1), mean_loss, lr=0.0)
        probe()

    assert scales_of(policy, ranks, training_only=True, run=probe) is None
    wanted = scales_of(policy, ranks, training_only=False, run=lambda: policy.logprobs(batches(1)))
    assert wanted is not None
    assert scales_of(policy, ranks, training_only=True, run=step) == wanted
    assert scales_of(policy, ranks, training_only=False, run=step) != wanted


def test_what_is_recomputed_counts_once(policy: Policy, ranks: Ranks) -> None:
    again = Policy(policy.model_dir, PolicyConfig(lr=1e-3, recompute=True), dtype="float32", ranks=ranks, seed=0)
    observer = KvObserver(again.model, LAYERS, ranks.device)
    again.kv_observer = observer
    again.train_step(batches(1), mean_loss, lr=0.0)
    assert (observer._counts.sum(-1) == 20 + 17 + 9).all()


def test_a_run_that_goes_on_generates_with_the_scales_it_stopped_with(
    policy: Policy, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    config = Config(name="kv", precision=PrecisionConfig(kv_cache="fp8"))

    def trainer() -> Any:
        """What a process has when it starts."""
        precision = EnginePrecision(config.precision, Recipe(LLAMA, LAYERS, kv_scales=CALIBRATED))
        return SimpleNamespace(
            config=config,
            ranks=ranks,
            policy=policy,
            drafter=None,
            engine=SimpleNamespace(precision=precision),
            recorder=StepRecorder(ranks, Tracker(), tmp_path / "rollouts", tmp_path / "steps"),
            generator=SimpleNamespace(restore=lambda *_: None),
            refit=SimpleNamespace(guard=SimpleNamespace(confirm=lambda _: None, take_events=list)),
            checkpoints=Checkpoints(tmp_path / "checkpoints", policy, Retention(1)),
            continues=None,
            validation=SimpleNamespace(restore=lambda _: None, best=lambda: None, measured=[]),
            early_stop=SimpleNamespace(restore=lambda _: None, metric=None),
            lifetime=SimpleNamespace(saved=lambda _: None),
        )

    first = trainer()
    assert Trainer.restore(first) == 0
    assert first.engine.precision.kv_scales == CALIBRATED
    shipped = KvScales([0.1 + 0.2, 1e-9], [1 / 3, 2.5], [7.0, 0.25])  # to the last bit
    first.engine.precision.restore(shipped)
    Trainer.save(first, 1)
    first.checkpoints.wait()
    second = trainer()
    assert Trainer.restore(second) == 1
    assert second.engine.precision.kv_scales == shipped  # the first refit ships them; `finish` exports them
    second.engine.precision = EnginePrecision(PrecisionConfig(), None)  # with a BF16 one
    Trainer.save(second, 2)
    second.checkpoints.wait()
    assert read_manifest(tmp_path / "checkpoints" / "step=000002").kv_scales is None


def test_fp8_of_the_engine_is_checked_in_every_step_and_of_the_trainer_once_it_has_trained() -> None:
    calls: list[str] = []
    engine = SimpleNamespace(assert_quantised=lambda: calls.append("engine"))
    training: Any = SimpleNamespace(assert_quantised=lambda trained: calls.append("trainer"))
    alone = Ranks(0, 1, 0, torch.device("cpu"))
    in_fp8 = PrecisionMonitor(Config(name="fp8"), alone, engine, training, None, Path())
    for num_tokens in (0.0, 5.0, 5.0):
        in_fp8.check_engine()
        in_fp8.check_trainer(num_tokens)
    assert calls == ["engine", "engine", "trainer", "engine"]
    in_bf16 = PrecisionMonitor(Config(name="bf16"), alone, engine, None, None, Path())
    for num_tokens in (0.0, 5.0):
        in_bf16.check_engine()
        in_bf16.check_trainer(num_tokens)
    assert calls[4:] == ["engine", "engine"]


def test_an_engine_without_an_fp8_kv_cache_has_no_scales_to_store() -> None:
    assert (
        EnginePrecision(PrecisionConfig(generation="fp8"), Recipe(LLAMA, LAYERS, kv_scales=CALIBRATED)).kv_scales
        is None
    )
    assert EnginePrecision(PrecisionConfig(), None).kv_scales is None
