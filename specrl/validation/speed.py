"""Matched pairs: plain and speculative generation in turn, on one engine, of the step that would come after training.

So that a pair sees what training sees, the train stage leaves the texts that its last bubbles pre-generated for that
step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

Run = list[Generation]


def matched_pair(
    engine: Engine,
    requests: list[Request],
    batch: int,
    k: int | None,
    repeats: int,
    give_texts: Callable[[], None] | None = None,
) -> SpeedPair:
    """Generate all requests, `batch` at a time, plain and with `k` draft tokens, `repeats` times each, in turn.

    With `k` of None the cost model chooses. `give_texts` gives the engine all text to begin with, before each
    speculative repeat and outside of its time.
    """
    runs: dict[int | None, list[Run]] = {0: [], k: []}
    for repeat in range(repeats):
        for length in (0, k) if repeat % 2 == 0 else (k, 0):
            engine.set_k(length)
            engine.reset_prefix_cache()
            recall = give_texts is not None and length != 0
            if give_texts is not None and recall:
                give_texts()
            parts = [requests[i : i + batch] for i in range(0, len(requests), batch)]
            runs[length].append([engine.generate(part, recall=recall) for part in parts])
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
    )


def _rate(run: Run) -> float:
    return sum(part.num_tokens for part in run) / sum(part.seconds for part in run)


def _decode_steps(run: Run) -> int:
    return sum(part.stats.decode_steps for part in run)


def _token_share(runs: Sequence[Run]) -> dict[str, float]:
    parts = [part for run in runs for part in run]
    by_source = SpeculationStats.merge(part.stats for part in parts).by_source
    num_tokens = sum(part.num_tokens for part in parts)
    return {source: counts.num_accepted_tokens / num_tokens for source, counts in by_source.items()}


def _share_equal(left: Sequence[Run], right: Sequence[Run]) -> float:
    plain, other = (
        [answer.tokens for run in runs for part in run for answer in part.responses] for runs in (left, right)
    )
    return sum(a == b for a, b in zip(plain, other, strict=True)) / len(plain)


FOLDER, STATE_FILE = "next_step", "state.json"
"""The folder in that of the train stage, and the file in it with all but the texts."""


def write_next_step(stage_dir: Path, step: int, ranks: Ranks, generator: RolloutGenerator, engine: Engine) -> None:
    """Write what `step`, the one after the last, would find and no rollout tells (collective)."""
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
    """The texts that were pre-generated for the step."""
    recent: Sequence[Sequence[Sequence[int]]]  # the first engine's responses, by step; the oldest first in both

    @classmethod
    def read(cls, train_dir: Path, step: int, config: Config, source: PromptSource) -> NextStep:
        """The step that follows `step` steps of the train stage; only its last step leaves pre-generated text."""
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
            stored=[text for file in files for text in read_texts(file)],
            recent=recent_responses(train_dir / "rollouts", step, most),
        )

    def opened(self, engine: Engine, config: Config, rewards: RewardPool | None) -> NextStep:
        """The step with its prompts as the environment opens their conversations (collective over the engine)."""
        return replace(self, prompts=open_conversations(engine, self.prompts, config, rewards))

    def requests(self, count: int, config: Config) -> list[Request]:
        """`count` requests of the step, of as many prompts as there are; more ask for further responses."""
        origin, prompts = Origin(config.seed, self.step), self.prompts
        return [make_request(prompts[i % len(prompts)], i // len(prompts), config, origin) for i in range(count)]

    def give_texts(self, engine: Engine) -> None:
        """Let the engine have the texts that the first engine would begin the step with, and no others."""
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
    """The first engine's last responses before `step`, some `most_tokens` tokens, by step, the oldest first."""
    found: list[list[list[int]]] = []
    count = 0
    while count < most_tokens and (path := rollout_path(rollouts_dir, step - 1 - len(found), 0)).is_file():
        table = read_table(path).select(["rank", "finished_at", "response_tokens"])
        table = table.filter(pc.equal(table["rank"], 0))
        responses = table.take(pc.sort_indices(table["finished_at"]))["response_tokens"].to_pylist()
        found.append(responses)
        count += sum(map(len, responses))
    return found[::-1]
