"""Measure for `specrl bench agreement` how far engine and trainer agree about tokens of one policy, by their precision.

Each engine samples with each seed, and each trainer scores the samples. Nothing is trained, so that all pairs have
equal weights; `specrl bench precision` shows what disagreement does to learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specrl.bench.job import say
from specrl.bench.settings import AgreementSettings
from specrl.bench.subject import Subject
from specrl.config import Config, PrecisionConfig, SpeculationConfig
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.models.sources import load_tokenizer
from specrl.precision.mismatch import MismatchSums
from specrl.precision.recipe import Recipe
from specrl.rollout.collect import Origin, collect
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout
from specrl.stages.train import training_precision
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.policy import Policy

PRECISIONS = ("bf16", "fp8")
NAMES = {
    ("bf16", "bf16"): "BF16",
    ("fp8", "fp8"): "FP8 both",
    ("fp8", "bf16"): "FP8 generation only",
    ("bf16", "fp8"): "FP8 training only",
}
ERROR = "mismatch/token_mult_prob_error"


@dataclass(frozen=True)
class EnginePair:
    """The agreement of an engine and a trainer about what the engine sampled with one seed."""

    generation: str
    training: str
    seed: int
    tokens: int
    metrics: dict[str, float]

    def row(self) -> dict[str, Any]:
        """Return the figures as a row for `--json`."""
        who = {"generation": self.generation, "training": self.training, "seed": self.seed, "tokens": self.tokens}
        return who | {name.partition("/")[2]: value for name, value in self.metrics.items()}


def with_precision(config: Config, precision: str) -> Config:
    """Return the run's configuration with both engines in one precision, without drafts, which change no log-prob."""
    chosen = config.precision.model_dump() | {"generation": precision, "training": precision, "kv_cache": "bf16"}
    return config.model_copy(
        update={
            "precision": PrecisionConfig.model_validate(chosen),
            "speculation": SpeculationConfig(method="none", k=0),
        }
    )


def sample(subject: Subject, precision: str, recipe: Recipe, settings: AgreementSettings) -> dict[int, list[Rollout]]:
    """Return the responses of an engine in this precision to held-out prompts, by seed."""
    config, policy_dir = with_precision(subject.config, precision), subject.first_policy_dir
    source = PromptSource(config, load_tokenizer(policy_dir), problems_dir=config.problems_dir)
    prompts = source.held_out(settings.num_prompts)
    own = recipe if precision == "fp8" else None
    engine = Engine(policy_dir, None, config=config, seed=config.seed, recipe=own, speculate=False)
    found = {}
    for seed in settings.seeds:
        origin = Origin(seed, step=0)
        found[seed] = collect(engine, prompts, settings.samples_per_prompt, config, None, origin).scored()[0]
    engine.assert_quantised()
    say(f"sampled with the engine in {precision}, FP8 {engine.mode}")
    engine.shutdown()
    return found


def compare(
    subject: Subject, precision: str, recipe: Recipe, sampled: dict[str, dict[int, list[Rollout]]], ranks: Ranks
) -> list[EnginePair]:
    """Compare a trainer in this precision with each engine."""
    config = with_precision(subject.config, precision)
    linears = training_precision(config, recipe)
    policy = Policy(
        subject.first_policy_dir, config.policy, dtype=config.model.dtype, ranks=ranks, seed=config.seed, fp8=linears
    )
    pairs = []
    for generation, by_seed in sampled.items():
        for seed, rollouts in by_seed.items():
            trained = score(policy, rollouts, config)
            generated = np.concatenate([rollout.whole_generation_logprobs for rollout in rollouts])
            metrics = MismatchSums.of(trained, generated).metrics()
            pairs.append(EnginePair(generation, precision, seed, len(generated), metrics))
            say(f"{NAMES[generation, precision]}, seed {seed}: error {metrics[ERROR]:.4f}, {len(generated)} tokens")
    if linears is not None:
        linears.assert_quantised()
    return pairs


def score(policy: Policy, rollouts: Sequence[Rollout], config: Config) -> torch.Tensor:
    """Return the trainer's log-probs of all response tokens in nats, float32 [tokens], in the order of the rollouts."""
    sequences = [
        TokenSequence.of(rollout.prompt_tokens, rollout.response_tokens, index)
        for index, rollout in enumerate(rollouts)
    ]
    batches = pack(sequences, config.policy.tokens_per_micro_batch, policy.pad_multiple)
    by_index: dict[int, torch.Tensor] = {}
    for batch, logprobs in zip(batches, policy.logprobs(batches, temperature=config.sampling.temperature), strict=True):
        by_index |= {index: logprobs[row][batch.mask[row]].cpu() for row, index in enumerate(batch.indices)}
    return torch.cat([by_index[index] for index in range(len(rollouts))])
