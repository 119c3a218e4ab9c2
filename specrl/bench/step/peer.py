"""TRL's GRPO trainer on the work of a train stage, a step at a time.

Run as `python -m specrl.bench.step.peer CONTEXT.json SEQUENCES PRECISION PARENT`. It is set up to be as fast as it
gets on a CPU with the same work: no gradient checkpointing, no reference, no logging, no checkpoints. Its responses
come from transformers' `generate`: its vLLM modes need a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from specrl.artifacts import PrepareResult
from specrl.bench.interleaved.turns import Turns
from specrl.config import Config
from specrl.context import StageContext
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.models.sources import load_tokenizer
from specrl.processes import end_with_parent


class Clock:
    """The wall times of the parts of a step, and the tokens that it trained on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens = 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds its wall time to a part."""

        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            found = function(*arguments, **named)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started
            return found

        return call

    def counted(self, function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Return the function that makes the batch to train on, and count its response tokens."""

        def call(*arguments: Any) -> dict[str, Any]:
            batch = function(*arguments)
            self.tokens += int(batch["completion_mask"].sum())
            return batch

        return call


class TakeTurns(TrainerCallback):  # type: ignore[misc]
    """Begins each step when it is this process's turn, and says how long it took."""

    def __init__(self, turns: Turns, clock: Clock) -> None:
        self._turns, self._clock = turns, clock
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the turn, and end the process when there is none any more."""
        if not self._turns.wait():
            raise SystemExit
        self._clock.seconds, self._clock.tokens = {}, 0
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Answer with the step's times."""
        step_s = time.perf_counter() - self._started
        generation_s, rollouts_s = self._clock.seconds["generation"], self._clock.seconds["rollouts"]
        self._turns.done(
            step_s=step_s, generation_s=generation_s, update_s=step_s - rollouts_s, tokens=self._clock.tokens
        )


def run(path: Path, sequences: int, precision: str, parent: int) -> None:
    """Train for the steps of the context, each when the parent says so.

    Args:
        path: The file with the context of specrl's train stage.
        sequences: The number of sequences in one forward and backward pass.
        precision: `mixed` for weights and moments in FP32 and products in BF16, `bf16` for BF16 alone.
        parent: The process id of the parent.
    """
    end_with_parent(parent)
    turns, clock = Turns(), Clock()
    context = StageContext.load(path)
    config = context.config
    policy_dir = context.input("prepare", PrepareResult).policy_dir
    tokenizer = load_tokenizer(policy_dir)
    source = PromptSource(config, tokenizer)
    prompts = [prompt for step in range(config.train.num_steps) for prompt in source.batch(step)]
    by_text = {prompt.text: prompt for prompt in prompts}
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(
            policy_dir, dtype=torch.bfloat16 if precision == "bf16" else torch.float32
        ),
        reward_funcs=reward_function(config, by_text),
        args=trainer_arguments(config, context.stage_dir / "peer", sequences, mixed=precision == "mixed"),
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[TakeTurns(turns, clock)],
    )
    # A template may have special tokens that TRL's own call of the tokenizer would add once more.
    trainer._tokenize_prompts = lambda texts: ([by_text[text].tokens for text in texts], None, {})
    trainer._generate = clock.timed("generation", trainer._generate)
    rollouts = clock.counted(trainer._generate_and_score_completions)
    trainer._generate_and_score_completions = clock.timed("rollouts", rollouts)
    turns.done()
    trainer.train()


def reward_function(config: Config, by_text: Mapping[str, Prompt]) -> Callable[..., list[float]]:
    """Return the run's own reward as TRL calls it. It runs where a run's does, in processes that end with this one."""
    pool = RewardPool(config.data)

    def score(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
        scoring = pool.begin(config.data)
        for number, (text, response) in enumerate(zip(prompts, completions, strict=True)):
            scoring.submit(number, by_text[text], response)
        return scoring.wait().rewards

    return score


def trainer_arguments(config: Config, folder: Path, sequences: int, *, mixed: bool) -> Any:
    """Return TRL's settings for the work of specrl's configuration.

    Args:
        sequences: The number of sequences in one forward and backward pass.
        mixed: Whether FP32 weights are cast to BF16 for the products.
    """
    train, policy, sampling = config.train, config.policy, config.sampling
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=mixed,
        max_steps=train.num_steps,
        per_device_train_batch_size=sequences,
        gradient_accumulation_steps=train.prompts_per_step * train.samples_per_prompt // sequences,
        num_generations=train.samples_per_prompt,
        shuffle_dataset=False,
        max_completion_length=sampling.max_response_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        loss_type="dapo",
        epsilon=train.loss.options["clip_low"],
        epsilon_high=train.loss.options["clip_high"],
        beta=0.0,
        learning_rate=policy.lr,
        lr_scheduler_type="constant",
        weight_decay=policy.weight_decay,
        adam_beta1=policy.beta1,
        adam_beta2=policy.beta2,
        max_grad_norm=policy.clip_grad,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
