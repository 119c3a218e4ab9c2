"""Prompts of every stream: training, held-out, drafter pretraining, warm-start demonstrations.

Streams have seeds of their own, and a held-out problem never appears in another stream, whatever its size.
"""

from __future__ import annotations

import string
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from specrl.config import Config, ConfigError, DataConfig
from specrl.data.files import FileProblems
from specrl.data.generators import GeneratorMixture
from specrl.data.problems import Problem, ProblemSource, derive_seed

CHAT = "chat"


@dataclass(frozen=True)
class Prompt:
    id: int
    """63 bits: a hash of stream, text and occurrence, so unique within a batch and the same in every run."""
    text: str
    """With the template applied."""
    tokens: list[int]
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """`question` before the template; `generator` and `entry` for the generator's own scorer."""

    @property
    def difficulty(self) -> str:
        """What is known beforehand of how long an answer takes: generator, and number of terms or length of the prompt.

        reasoning-gym's own `difficulty` is the range its settings allow, the same for every problem."""
        terms = (self.metadata.get("entry") or {}).get("terms")
        measure = f"{len(terms)} terms" if terms else f"{len(self.tokens) // 8 * 8} tokens"
        return f"{self.metadata.get('generator', 0)}: {measure}"


class PromptSource:
    """All prompts of a run.

    Raises:
        ConfigError: unknown generator or parameter, unreadable file, bad template, a prompt that leaves no room for
            `sampling.max_response_tokens`, or fewer held-out problems than asked for.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config = config
        self.tokenizer = tokenizer
        self._problems = make_problems(config.data, config.seed)
        check_template(config.data.template)
        if config.data.template == CHAT and not tokenizer.chat_template:
            raise ConfigError(
                'data.template = "chat": the tokenizer has no chat template; give a format string instead'
            )

    def batch(self, step: int) -> list[Prompt]:
        """The `train.prompts_per_step` training prompts of a step: a pure function of (seed, step)."""
        return self._prompts("train", self._problems.draw("train", step, self._config.train.prompts_per_step))

    def held_out(self, count: int) -> list[Prompt]:
        """Distinct prompts never trained on; fewer are a prefix of more."""
        return self._prompts("held-out", self._problems.held_out(count))

    def pretraining(self, count: int) -> list[Prompt]:
        """Prompts on which the drafter is pretrained."""
        return self._prompts("pretraining", self._problems.draw("pretraining", 0, count))

    def demonstrations(self, count: int) -> list[tuple[Prompt, str]]:
        """Prompts with a response that earns full reward: worked steps where there are some, else the answer."""
        problems = self._problems.draw("demonstrations", 0, count)
        prompts = self._prompts("demonstrations", problems)
        return [(prompt, problem.demonstration) for prompt, problem in zip(prompts, problems, strict=True)]

    def check(self) -> None:
        """Draw what the run starts with, so that mistakes show before anything is trained."""
        self.batch(0)
        self.held_out(self._config.validate_.num_prompts)
        self.pretraining(self._config.drafter.num_prompts)

    def _prompts(self, stream: str, problems: list[Problem]) -> list[Prompt]:
        occurrences: Counter[str] = Counter()
        prompts = []
        for problem in problems:
            text = self._render(problem.question)
            prompt_id = derive_seed(stream, text, occurrences[text])
            occurrences[text] += 1
            metadata = {"question": problem.question, "generator": problem.generator, "entry": problem.entry}
            prompts.append(Prompt(prompt_id, text, self._encode(text), problem.answer, metadata))
        return prompts

    def _render(self, question: str) -> str:
        template = self._config.data.template
        if template != CHAT:
            return template.format(prompt=question)
        message = [{"role": "user", "content": question}]
        return str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        # A chat template writes its special tokens itself.
        special = self._config.data.template != CHAT
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        room = self._config.model.max_length - self._config.sampling.max_response_tokens
        if len(tokens) > room:
            shown = text if len(text) <= 80 else f"{text[:77]}..."
            raise ConfigError(
                f"prompt {shown!r} has {len(tokens)} tokens, but model.max_length - sampling.max_response_tokens "
                f"leaves room for {room}"
            )
        return tokens


def make_problems(config: DataConfig, seed: int) -> ProblemSource:
    """The run's problems, from generators or a file.

    Raises:
        ConfigError: unknown generator or parameter, unreadable file, missing column.
    """
    return FileProblems(config, seed) if config.source == "file" else GeneratorMixture(config, seed)


def check_template(template: str) -> None:
    """
    Raises:
        ConfigError: not `chat` and not a format string whose only field is `{prompt}`.
    """
    if template == CHAT:
        return
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"data.template = {template!r}: {error}") from error
    if fields != {"prompt"}:
        raise ConfigError(f'data.template = {template!r}: must contain {{prompt}} and no other field, or be "chat"')
