"""The prompts of every stream: training, held-out, drafter pretraining and warm-start demonstrations.

Each stream has its own seeds, and a held-out problem never appears in another stream, however much is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from specrl.config import Config, ConfigError
from specrl.data.files import placed_requests
from specrl.data.held_out import config_of_set, held_out_problems, make_problems
from specrl.data.problems import Problem, Prompt, derive_seed
from specrl.data.rendering import Rendering
from specrl.data.store import ProblemStore

RECENT = 3
"""The number of steps whose prompts are remembered: where idle time is put to use, two steps' are asked for in turn."""


@dataclass(frozen=True)
class PromptReport:
    """What was found when a run's prompts were looked at for the first time."""

    seen: int
    overlong: int
    """Those with more tokens than `data.max_prompt_tokens`, which were dropped or truncated."""
    longest: int
    """The tokens of the longest, before that."""
    notes: list[str]
    """A line for each thing that a user may not expect."""


class PromptSource:
    """All prompts of a run. Those that are too long are dropped or truncated as `data.overlong` says."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        begun: tuple[int, int] = (0, 0),
        *,
        problems_dir: Path | None = None,
        draws_anew: bool = False,
        on_slow: Callable[[int], None] | None = None,
    ) -> None:
        """Open the problems of `[data]`.

        Args:
            tokenizer: The policy's tokenizer, of transformers.
            begun: The step from which on the configuration holds, and the number of prompts that training had before
                it, with another `train.prompts_per_step`.
            problems_dir: The folder for problems that take long to draw, `Config.problems_dir`; without it they are
                drawn each time.
            draws_anew: Whether to draw and write even what is in that folder.
            on_slow: Called with the number of each step whose problems take long to draw, once they are there.

        Raises:
            ConfigError: A generator or parameter is unknown, a file is unreadable or has a row that no prompt can be
                made of, or the template is wrong.
        """
        self._config = config
        self.begun = begun
        self.tokenizer = tokenizer
        self._rendering = Rendering(config, tokenizer)
        self._problems = make_problems(config.data, config.seed, self._rendering.fit)
        self._problems_dir, self._draws_anew, self._on_slow = problems_dir, draws_anew, on_slow
        self._store = self._store_of(config)
        self._recent: dict[int, list[Prompt]] = {}

    def _store_of(self, config: Config) -> ProblemStore:
        return ProblemStore.of(self._problems_dir, config, self.tokenizer, reads=not self._draws_anew)

    def batch(self, step: int) -> list[Prompt]:
        """The `train.prompts_per_step` training prompts of a step, a pure function of the seed and the step."""
        if step not in self._recent:
            self._recent[step] = self._draw(step)
            for earliest in list(self._recent)[:-RECENT]:
                del self._recent[earliest]
        return list(self._recent[step])

    def _draw(self, step: int) -> list[Prompt]:
        (begun, before), count = self.begun, self._config.train.prompts_per_step
        if self._config.data.num_problems is not None:
            step %= self._config.data.num_problems // count
        drawn = max(0, before + (step - begun) * count)

        def draw(count: int) -> list[Problem]:
            return self._problems.draw("train", step, count, drawn)

        problems, is_slow = self._store.take(f"train-{step:06d}", count, draw)
        if is_slow and self._on_slow is not None:
            self._on_slow(step)
        return self._prompts("train", problems)

    def held_out(self, count: int) -> list[Prompt]:
        """Distinct prompts that are never trained on; a smaller number gives the first ones of a larger number.

        Raises:
            ConfigError: There are fewer held-out problems.
        """
        return self._prompts("held-out", self._store.take("held-out", count, self._problems.held_out)[0])

    def validation(self, name: str) -> list[Prompt]:
        """The prompts of the held-out set of this name.

        Raises:
            ConfigError: A file or a generator is wrong, or there are fewer problems than asked for.
        """
        chosen = self._config.validate_.held_out_sets[name]
        count = chosen.num_prompts or self._config.validate_.num_prompts
        if not chosen.has_problems:
            return self.held_out(count)
        store = self._store_of(config_of_set(self._config, name))

        def draw(_: int) -> list[Problem]:
            return held_out_problems(self._config, name, self._rendering.fit)

        return self._prompts(f"held-out/{name}", store.take("held-out", count, draw)[0])

    def pretraining(self, count: int) -> list[Prompt]:
        """The prompts whose responses the drafter is pretrained on."""

        def draw(count: int) -> list[Problem]:
            return self._problems.draw("pretraining", 0, count, 0)

        return self._prompts("pretraining", self._store.take("pretraining", count, draw)[0])

    def drafter_data(self, count: int) -> list[Prompt]:
        """Prompts of `drafter.data`, in an order that the seed decides, over and over if there are too few.

        One that leaves no room for a response is cut at its beginning.

        Raises:
            ConfigError: The file cannot be used, or the chat template refuses a row.
        """
        assert self._config.drafter.data is not None
        requests = placed_requests(self._config.drafter.data)
        Random(derive_seed(self._config.seed, "drafter-data")).shuffle(requests)
        room = self._config.model.max_length - self._config.sampling.max_response_tokens
        prompts = []
        for index in range(count):
            place, request = requests[index % len(requests)]
            try:
                text = self._rendering.chat(request)
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
            tokens = self._rendering.tokens(text, of_chat=True)[-room:]
            prompts.append(Prompt(derive_seed("drafter-data", text, index), text, tokens, answer=""))
        return prompts

    def demonstrations(self, count: int) -> list[tuple[Prompt, str]]:
        """Prompts, each with a response that earns full reward, with worked steps if there are any."""
        problems = self._problems.draw("demonstrations", 0, count, 0)
        prompts = self._prompts("demonstrations", problems)
        return [(prompt, problem.demonstration) for prompt, problem in zip(prompts, problems, strict=True)]

    def check(self) -> PromptReport:
        """Draw the first training batch and all held-out and pretraining prompts, so that mistakes show early.

        The report counts what was drawn: a source that takes what is kept has nothing to report of it.

        Raises:
            ConfigError: There are too few problems, or a prompt is too long and `data.overlong` refuses that.
        """
        self.batch(0)
        validate = self._config.validate_
        shares = [chosen.num_prompts or 0 for chosen in validate.held_out_sets.values() if not chosen.has_problems]
        self.held_out(max([validate.num_prompts, *shares]))
        seen = [line for name in validate.held_out_sets for line in self._trained_on(name)]
        self.pretraining(self._config.drafter.num_prompts)
        if self._config.drafter.data is not None:
            self.drafter_data(self._config.drafter.data_prompts)
        counts, data = self._rendering.counts, self._config.data
        lines = [*self._problems.notes(self._config.train.prompts_per_step), *seen]
        if counts.overlong:
            done = "dropped" if data.overlong == "drop" else "truncated"
            lines.append(
                f"{counts.overlong} of the {counts.seen} prompts looked at have more than {self._rendering.limit} "
                f"tokens (data.max_prompt_tokens) and were {done} (data.overlong); the longest has {counts.longest}"
            )
        if counts.unusable:
            lines.append(f"{counts.unusable} of the {counts.seen} generated problems make no prompt and were left out")
        return PromptReport(counts.seen, counts.overlong, counts.longest, lines)

    def _trained_on(self, name: str) -> list[str]:
        if not self._config.validate_.held_out_sets[name].has_problems:
            return []
        questions = [prompt.metadata["question"] for prompt in self.validation(name)]
        count = sum(self._problems.trains_on(question) for question in questions)
        if not count:
            return []
        return [f"validate.sets.{name}: {count} of its {len(questions)} problems are trained on too"]

    def _prompts(self, stream: str, problems: list[Problem]) -> list[Prompt]:
        occurrences: Counter[str] = Counter()
        prompts = []
        for problem in problems:
            text = self._rendering.text(problem.question, problem.context)
            prompt_id = derive_seed(stream, text, occurrences[text])
            occurrences[text] += 1
            metadata = {"question": problem.question, "generator": problem.generator, "entry": problem.entry}
            prompts.append(Prompt(prompt_id, text, self._rendering.tokens(text), problem.answer, metadata))
        return prompts
