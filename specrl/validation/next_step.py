"""The RL step that would come after training: its requests, and what they would find to draft from.

The train stage leaves what a step finds and no rollout tells: the texts that the last bubbles pre-generated with the
next step's seeds. The stage `validate` measures its matched pairs on
that step, so that a pair sees what training sees.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from specrl.artifacts import NextStepText, write_json
from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.rollout.bubbles.generator import RolloutGenerator
from specrl.rollout.bubbles.pregeneration import store_texts
from specrl.rollout.bubbles.texts import PregeneratedText, read_texts, write_texts
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.engine import Engine, Request
from specrl.schemas import rollout_path

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
    """The step after the one that a policy was trained by last."""

    step: int
    prompts: list[Prompt]
    samples_per_prompt: int
    stored: Mapping[int, Sequence[PregeneratedText]]
    """The texts that were pre-generated for the step, by the prompt's id."""
    recent: Sequence[Sequence[Sequence[int]]]
    """The responses that the first engine generated in each of the last steps; in both, the oldest first."""

    @classmethod
    def read(cls, train_dir: Path, step: int, config: Config, source: PromptSource) -> NextStep:
        """The step that follows a policy of the train stage in `train_dir`.

        There is pre-generated text only for a policy after the last step, in the job that ended with that step.

        Args:
            step: The number of RL steps that the policy was trained for.
            source: The prompts of the run's first step on.
        """
        path = train_dir / FOLDER / STATE_FILE
        state: dict[str, Any] = {"step": None, "begun": (0, 0)}
        if path.is_file():
            state = json.loads(path.read_text())
        begun, before = state["begun"]
        stored: dict[int, list[PregeneratedText]] = {}
        if state["step"] == step:
            for file in sorted(path.parent.glob("rank-*.arrow")):
                for text in read_texts(file):
                    stored.setdefault(text.prompt_id, []).append(text)
        speculation = config.speculation
        most = speculation.recent_tokens if speculation.draft_method.replays else 0
        return cls(
            step=step,
            prompts=PromptSource(config, source.tokenizer, (begun, before), prompts_dir=source.prompts_dir).batch(step),
            samples_per_prompt=config.train.samples_per_prompt,
            stored=stored,
            recent=recent_responses(train_dir / "rollouts", step, most),
        )

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
        """How much text there is, for the result file of `validate`."""
        stored = [text for prompt in self.prompts for text in self.stored.get(prompt.id, ())]
        responses = [response for generation in self.recent for response in generation]
        return NextStepText(
            step=self.step,
            num_responses=len(self.prompts) * self.samples_per_prompt,
            num_stored=len(stored),
            stored_tokens=sum(len(text.tokens) for text in stored),
            num_recent=len(responses),
            recent_tokens=sum(map(len, responses)),
        )


def recent_responses(rollouts_dir: Path, step: int, most_tokens: int) -> list[list[list[int]]]:
    """The responses of the first engine in the steps before `step`, as many as have `most_tokens` tokens.

    Returns:
        The responses of each step in the order in which they were finished; the oldest step first.
    """
    found: list[list[list[int]]] = []
    count = 0
    while count < most_tokens and (path := rollout_path(rollouts_dir, step - 1 - len(found), 0)).is_file():
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all().select(["rank", "finished_at", "response_tokens"])
        table = table.filter(pc.equal(table["rank"], 0))
        responses = table.take(pc.sort_indices(table["finished_at"]))["response_tokens"].to_pylist()
        found.append(responses)
        count += sum(map(len, responses))
    return found[::-1]
