"""The prompts of every stream: training, held-out, drafter pretraining and warm-start demonstrations.

Each stream has its own seeds, and a held-out problem never appears in another stream, however much is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from specrl.config import Config
from specrl.config.base import prefixed
from specrl.data.answers import close_thoughts
from specrl.data.files import FileProblems, placed_requests
from specrl.data.held_out import config_of_set, held_out_problems, make_problems
from specrl.data.problems import Counts, Problem, Prompt, derive_seed
from specrl.data.rendering import Rendering
from specrl.data.shards import HELD_OUT, GeneratorMixture

Shard = tuple[GeneratorMixture, str, int]
"""Whose problems a shard holds, the stream, and the shard's number."""


class PromptSource:
    """All prompts of a run; `data.overlong` decides whether overlong ones are dropped or truncated."""

    def __init__(
        self, config: Config, tokenizer: Any, begun: tuple[int, int] = (0, 0), *, prompts_dir: Path | None = None
    ) -> None:
        """Open the problems of `[data]`.

        `begun` is the step from which the configuration holds and the number of prompts before it, when
        `train.prompts_per_step` may have differed. `prompts_dir` holds the shards, which are drawn on demand; without
        it, problems are drawn every time.
        """
        self._config = config
        self.begun = begun
        self.tokenizer = tokenizer
        self._rendering = Rendering(config, tokenizer)
        self._counts, self.prompts_dir = Counts(), prompts_dir
        self._problems = make_problems(config, self._rendering.fit, self._counts, prompts_dir)

    def batch(self, step: int) -> list[Prompt]:
        """The training prompts of a step, a pure function of the seed and the step."""
        return self._prompts("train", self._drawn(step))

    def refill(self, step: int, number: int) -> list[Prompt]:
        """The prompts of a step's n-th refill, counted from 1: a pure function of seed, step and refill number.

        Their ids are unique within the step, however few prompts of each refill are used.
        """
        drawn = [self._drawn(step), *(self._drawn_again(step, earlier) for earlier in range(1, number + 1))]
        return self._prompts("train", [problem for problems in drawn for problem in problems])[-len(drawn[-1]) :]

    def _first(self, step: int) -> int:
        begun, before = self.begun
        return max(0, before + (step - begun) * self._config.train.prompts_per_step)

    def _drawn(self, step: int) -> list[Problem]:
        first, count = self._first(step), self._config.train.prompts_per_step
        if (size := self._config.data.num_problems) is None:
            return self._problems.draw("train", first, count)
        left = size - first % size
        found = self._problems.draw("train", first % size, min(count, left))
        return found + (self._problems.draw("train", 0, count - left) if count > left else [])

    def _drawn_again(self, step: int, number: int) -> list[Problem]:
        first, count = self._first(step), self._config.train.prompts_per_step
        if (size := self._config.data.num_problems) is None:
            return self._problems.draw(f"refill-{number}", first, count)
        asked = {place % size for place in range(first, first + count)}
        order = Random(derive_seed(self._config.seed, "refill", step)).sample(range(size), size)
        others = [place for place in order if place not in asked] or order
        places = range((number - 1) * count, number * count)
        return [self._problems.draw("train", others[place % len(others)], 1)[0] for place in places]

    def shards(self, steps: range, *, others: bool = False) -> Iterator[Shard]:
        """Yield the shards of some steps in order, preceded (with `others`) by those that other stages need.

        Only first refills are included; further ones are drawn on demand.
        """
        config, validate = self._config, self._config.validate_
        first, count = self._first(steps.start), len(steps) * config.train.prompts_per_step
        if config.data.num_problems is not None:
            first, count = 0, config.data.num_problems
        own, fit = self._problems, self._rendering.fit
        wanted = [(own, "train", first, count)]
        if config.train.refill_rounds and config.data.num_problems is None:
            wanted.append((own, "refill-1", first, count))
        if others:
            streams = {"pretraining": config.drafter.num_prompts, "demonstrations": config.warm_start.num_examples}
            sets = {name: one.num_prompts for name, one in validate.held_out_sets.items() if one.generators}
            problems = {name: make_problems(config_of_set(config, name), fit, None, self.prompts_dir) for name in sets}
            wanted = [
                *((own, stream, 0, count) for stream, count in streams.items()),
                (own, HELD_OUT, 0, self._num_held_out),
                *((problems[name], HELD_OUT, 0, count or validate.num_prompts) for name, count in sets.items()),
                *wanted,
            ]
        for source, stream, first, count in wanted:
            if isinstance(source, GeneratorMixture):
                for number in source.shards(stream, first, count):
                    yield source, stream, number

    @property
    def _num_held_out(self) -> int:
        validate = self._config.validate_
        sets = [chosen.num_prompts or 0 for chosen in validate.held_out_sets.values() if not chosen.has_problems]
        return max([validate.num_prompts, *sets])

    def held_out(self, count: int) -> list[Prompt]:
        """Distinct prompts that are never trained on; a smaller number is a prefix of a larger."""
        return self._prompts("held-out", self._problems.held_out(count))

    def validation(self, name: str) -> list[Prompt]:
        chosen = self._config.validate_.held_out_sets[name]
        count = chosen.num_prompts or self._config.validate_.num_prompts
        if not chosen.has_problems:
            return self.held_out(count)
        found = held_out_problems(
            self._config, name, self._rendering.fit, counts=self._counts, prompts_dir=self.prompts_dir
        )
        return self._prompts(f"held-out/{name}", found)

    def pretraining(self, count: int) -> list[Prompt]:
        """The prompts whose responses pretrain the drafter."""
        return self._prompts("pretraining", self._problems.draw("pretraining", 0, count))

    def drafter_data(self, count: int) -> list[Prompt]:
        """Prompts of `drafter.data`, shuffled by the seed, repeated if there are too few.

        Prompts that leave no room for a response lose their beginning.
        """
        assert self._config.drafter.data is not None
        requests = placed_requests(self._config.drafter.data)
        Random(derive_seed(self._config.seed, "drafter-data")).shuffle(requests)
        room = self._config.model.max_length - self._config.sampling.max_response_tokens
        prompts = []
        for index in range(count):
            place, request = requests[index % len(requests)]
            with prefixed(f"{place}: "):
                text = self._rendering.chat(request)
            tokens = self._rendering.tokens(text, of_chat=True)[-room:]
            prompts.append(Prompt(derive_seed("drafter-data", text, index), text, tokens, answer=""))
        return prompts

    def demonstrations(self, count: int) -> list[tuple[Prompt, str]]:
        """Prompts, each with a response that earns full reward, including worked steps if available."""
        problems = self._problems.draw("demonstrations", 0, count)
        prompts = self._prompts("demonstrations", problems)
        pairs = zip(prompts, problems, strict=True)
        return [(prompt, close_thoughts(prompt.text, problem.demonstration)) for prompt, problem in pairs]

    def check(self) -> Counts:
        """Make the first training batch and all held-out and pretraining prompts, to reveal mistakes early."""
        self.batch(0)
        self.held_out(self._num_held_out)
        sets = self._config.validate_.held_out_sets.items()
        own_sets = {name: self.validation(name) for name, chosen in sets if chosen.has_problems}
        self.pretraining(self._config.drafter.num_prompts)
        if self._config.drafter.data is not None:
            self.drafter_data(self._config.drafter.data_prompts)
        counts, data = self._counts, self._config.data
        lines: list[str] = []
        if isinstance(self._problems, FileProblems):
            lines = self._problems.notes(self._config.train.prompts_per_step)
            for name, prompts in own_sets.items():
                if count := sum(prompt.metadata["question"] in self._problems.questions for prompt in prompts):
                    lines.append(f"validate.sets.{name}: {count} of its {len(prompts)} problems are trained on too")
        if counts.overlong:
            done = "truncated" if data.overlong.startswith("truncate") else "dropped"
            lines.append(
                f"{counts.overlong} of the {counts.seen} prompts looked at have more than {self._rendering.limit} "
                f"tokens (data.max_prompt_tokens) and were {done} (data.overlong); the longest has {counts.longest}"
            )
        if counts.unusable:
            lines.append(f"{counts.unusable} of the {counts.seen} generated problems make no prompt and were left out")
        return replace(counts, notes=lines)

    def _prompts(self, stream: str, problems: list[Problem]) -> list[Prompt]:
        occurrences: Counter[str] = Counter()
        prompts = []
        for problem in problems:
            text = self._rendering.text(problem.question, problem.context)
            prompt_id = derive_seed(stream, text, occurrences[text])
            occurrences[text] += 1
            prompts.append(Prompt(prompt_id, text, self._rendering.tokens(text), problem.answer, problem.metadata))
        return prompts
