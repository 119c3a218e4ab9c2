"""Matched pairs: alternating plain and speculative generation, on one engine, of the step that would follow training.

So that a pair has the same drafts as training, the train stage stores the texts that its last bubbles pre-generated
for that step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc

from specrl.artifacts import NextStepText, SpeedPair, write_json
from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.distributed import Ranks
from specrl.rollout.bubbles.generator import RolloutGenerator
from specrl.rollout.bubbles.pregeneration import store_texts
from specrl.rollout.bubbles.texts import PregeneratedText, read_texts, write_texts
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.conversations import open_conversations
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Generation, Request
from specrl.schemas import read_table, rollout_path


@dataclass
class Measurement:
    """The generations of one decoding method."""

    generations: list[list[Generation]] = field(default_factory=list)  # by round

    @property
    def rates(self) -> list[float]:
        """Tokens per second, by round."""
        return [
            sum(part.num_tokens for part in parts) / sum(part.seconds for part in parts) for parts in self.generations
        ]

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats.merge(part.stats for parts in self.generations for part in parts)

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for parts in self.generations for part in parts for answer in part.responses]


def matched_pair(
    engine: Engine,
    requests: list[Request],
    batch: int,
    k: int | None,
    repeats: int,
    give_texts: Callable[[], None] | None = None,
) -> SpeedPair:
    """Answer all requests, `batch` at a time, plain and with `k` draft tokens, `repeats` times each, alternately.

    If `k` is None, the cost model chooses. `give_texts` gives the engine its initial text before each speculative
    repeat, outside the measured time.
    """
    plain, speculative = Measurement(), Measurement()
    variants = (0, None, plain), (k, give_texts, speculative)
    for repeat in range(repeats):
        for length, prepare, measured in variants if repeat % 2 == 0 else variants[::-1]:
            engine.set_k(length)
            engine.reset_prefix_cache()
            if prepare is not None:
                prepare()
            parts = [requests[i : i + batch] for i in range(0, len(requests), batch)]
            measured.generations.append([engine.generate(part, recall=prepare is not None) for part in parts])
    engine.set_k(k)
    ratios = [fast / slow for fast, slow in zip(speculative.rates, plain.rates, strict=True)]
    tokens, stats, steps = speculative.tokens, speculative.stats, plain.stats.decode_steps
    num_tokens = sum(map(len, tokens))
    return SpeedPair(
        batch=batch,
        plain_tokens_per_s=median(plain.rates),
        speculative_tokens_per_s=median(speculative.rates),
        speedup=median(ratios),
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        # There are no decoding steps if every response is a single token.
        decode_step_reduction=1 - stats.decode_steps / steps if steps else 0.0,
        tokens_equal=sum(a == b for a, b in zip(plain.tokens, tokens, strict=True)) / len(tokens),
        token_share={source: found.num_accepted_tokens / num_tokens for source, found in stats.by_source.items()},
    )


FOLDER, STATE_FILE = "next_step", "state.json"
"""The folder within the train stage's, and its file with everything but the texts."""


def write_next_step(stage_dir: Path, step: int, ranks: Ranks, generator: RolloutGenerator, engine: Engine) -> None:
    """Write what `step`, the one after the last, would find but no rollout contains (collective)."""
    folder = stage_dir / FOLDER
    if ranks.is_first:
        shutil.rmtree(folder, ignore_errors=True)
        write_json(folder / STATE_FILE, {"step": step, "begun": generator.source.begun})
    ranks.barrier()
    if engine.is_first:
        write_texts(folder / f"rank-{ranks.rank:04d}.arrow", generator.next_texts)
    ranks.barrier()  # the stage's result comes last


@dataclass(frozen=True)
class NextStep:
    step: int
    prompts: list[Prompt]
    samples_per_prompt: int
    stored: Sequence[PregeneratedText]
    """The texts pre-generated for the step."""
    recent: Sequence[Sequence[Sequence[int]]]  # the first engine's responses, by step; oldest first in both

    @classmethod
    def read(cls, train_dir: Path, step: int, config: Config, source: PromptSource) -> NextStep:
        """The step after `step` steps of the train stage; only the one after its last has pre-generated text."""
        path = train_dir / FOLDER / STATE_FILE
        state: dict[str, Any] = {"step": None, "begun": (0, 0)}
        if path.is_file():
            state = json.loads(path.read_text())
        begun, before = state["begun"]
        files = sorted(path.parent.glob("rank-*.arrow")) if state["step"] == step else []
        speculation = config.speculation
        most = speculation.recent_tokens if speculation.draft_method.replays else 0
        return cls(
            step=step,
            prompts=PromptSource(config, source.tokenizer, (begun, before), prompts_dir=source.prompts_dir).batch(step),
            samples_per_prompt=config.train.samples_per_prompt,
            stored=[*{text.seed: text for file in files for text in read_texts(file)}.values()],  # several engines'
            recent=recent_responses(train_dir / "rollouts", step, most),
        )

    def opened(self, engine: Engine, config: Config, rewards: RewardPool | None) -> NextStep:
        """The step with its prompts as the environment opens their conversations (collective over the engine)."""
        return replace(self, prompts=open_conversations(engine, self.prompts, config, rewards))

    def requests(self, count: int, config: Config) -> list[Request]:
        """`count` requests of the step, one per prompt as far as there are prompts, then for further responses."""
        origin, prompts = Origin(config.seed, self.step), self.prompts
        return [make_request(prompts[i % len(prompts)], i // len(prompts), config, origin) for i in range(count)]

    def give_texts(self, engine: Engine) -> None:
        """Give the engine the texts with which the first engine would begin the step, and no others."""
        engine.set_recent(self.recent)
        if engine.replays:
            store_texts(engine, self.prompts, self.stored)

    def text(self) -> NextStepText:
        responses = [response for generation in self.recent for response in generation]
        return NextStepText(
            step=self.step,
            num_responses=len(self.prompts) * self.samples_per_prompt,
            num_stored=len(self.stored),
            stored_tokens=sum(len(text.tokens) for text in self.stored),
            num_recent=len(responses),
            recent_tokens=sum(map(len, responses)),
        )


def recent_responses(rollouts_dir: Path, step: int, most_tokens: int) -> list[list[list[int]]]:
    """The first engine's last responses before `step`, about `most_tokens` tokens, by step, the oldest first."""
    found: list[list[list[int]]] = []
    count = 0
    while count < most_tokens and (path := rollout_path(rollouts_dir, step - 1 - len(found), 0)).is_file():
        table = read_table(path).select(["rank", "finished_at", "response_tokens"])
        table = table.filter(pc.equal(table["rank"], 0))
        responses = table.take(pc.sort_indices(table["finished_at"]))["response_tokens"].to_pylist()
        found.append(responses)
        count += sum(map(len, responses))
    return found[::-1]
