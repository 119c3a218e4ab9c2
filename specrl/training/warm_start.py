"""A short supervised pass over demonstrations, so that a model that solves nothing yet can earn first rewards."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from specrl.config import Config, ConfigError
from specrl.data.problems import derive_seed
from specrl.data.prompts import PromptSource
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.megatron.policy import LossFn, Policy
from specrl.training.schedules import lr_factor

WARMUP_SHARE = 0.1
FINAL_LR_FRACTION = 0.1


def warm_start(
    policy: Policy,
    source: PromptSource,
    config: Config,
    on_step: Callable[[int, int, dict[str, float]], None] = lambda step, steps, metrics: None,
) -> None:
    """Train the policy once on each of `warm_start.num_examples` demonstrations (collective)."""
    batches = make_batches(demonstration_sequences(source, config), config.warm_start.batch_size, config.seed)
    for step, batch in enumerate(batches):
        share = batch[policy.dp_rank :: policy.dp_size]
        mine = pack(share, config.policy.tokens_per_micro_batch, policy.pad_multiple)
        num_tokens = sum(len(sequence.tokens) - sequence.prompt_length for sequence in batch)
        lr = config.warm_start.lr * schedule(step, len(batches))
        metrics, _ = policy.train_step(mine, cross_entropy(num_tokens), lr=lr)
        on_step(step, len(batches), {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "lr": lr})


def demonstration_sequences(source: PromptSource, config: Config) -> list[TokenSequence]:
    """Demonstrations as tokens; each response ends with the end-of-sequence token.

    Responses longer than `sampling.max_response_tokens` are left out: sampling would cut them off before the answer.
    """
    sequences: list[TokenSequence] = []
    for prompt, response in source.demonstrations(config.warm_start.num_examples):
        tokens = [*source.tokenizer.encode(response, add_special_tokens=False), source.tokenizer.eos_token_id]
        if len(tokens) <= config.sampling.max_response_tokens:
            sequences.append(TokenSequence.of(prompt.tokens, tokens, len(sequences)))
    if not sequences:
        raise ConfigError(
            f"sampling.max_response_tokens = {config.sampling.max_response_tokens} leaves none of the "
            f"{config.warm_start.num_examples} demonstrations to train on: raise it, or set warm_start.num_examples = 0"
        )
    return sequences


def make_batches(sequences: list[TokenSequence], batch_size: int, seed: int) -> list[list[TokenSequence]]:
    by_length = sorted(sequences, key=lambda sequence: len(sequence.tokens))
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    Random(derive_seed(seed, "warm-start")).shuffle(batches)
    return batches


def schedule(step: int, num_steps: int) -> float:
    warmup_steps = round(num_steps * WARMUP_SHARE)
    return lr_factor(step, num_steps, decay="linear", warmup_steps=warmup_steps, final_fraction=FINAL_LR_FRACTION)


def cross_entropy(num_tokens: int) -> LossFn:
    """A loss that sums to the mean negative log-prob of the `num_tokens` response tokens of all ranks."""

    def loss(
        logprobs: torch.Tensor,  # [batch, seq]
        entropy: torch.Tensor,  # [batch, seq]
        batch: MicroBatch,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(logprobs * batch.mask).sum() / num_tokens, {}

    return loss
