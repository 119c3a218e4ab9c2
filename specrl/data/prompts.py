"""The prompts of every stream: training, held-out, drafter pretraining and warm-start demonstrations.

Each stream has its own seeds, and a held-out problem never appears in another stream, however much is drawn.
"""

from __future__ import annotations

import string
from collections import Counter
from typing import Any

from specrl.config import Config, ConfigError
from specrl.data.held_out import held_out_problems, make_problems
from specrl.data.problems import Problem, Prompt, derive_seed

CHAT = "chat"
"""The value of `data.template` that stands for the tokenizer's chat template."""


class PromptSource:
    """All prompts of a run.

    Every method raises ConfigError where a prompt leaves no room for `sampling.max_response_tokens`.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Open the problems of `[data]`.

        Args:
            tokenizer: The policy's tokenizer, of transformers.

        Raises:
            ConfigError: A generator or parameter is unknown, a file is unreadable, or the template is wrong.
        """
        self._config = config
        self.tokenizer = tokenizer
        self._problems = make_problems(config.data, config.seed)
        check_template(config.data.template)
        if config.data.template == CHAT and not tokenizer.chat_template:
            raise ConfigError(
                'data.template = "chat": the tokenizer has no chat template; give a format string instead'
            )

    def batch(self, step: int) -> list[Prompt]:
        """Return the `train.prompts_per_step` training prompts of a step, a pure function of the seed and the step."""
        return self._prompts("train", self._problems.draw("train", step, self._config.train.prompts_per_step))

    def held_out(self, count: int) -> list[Prompt]:
        """Return distinct prompts that are never trained on; a smaller number gives the first ones of a larger number.

        Raises:
            ConfigError: There are fewer held-out problems.
        """
        return self._prompts("held-out", self._problems.held_out(count))

    def validation(self, name: str) -> list[Prompt]:
        """Return the prompts of the held-out set of this name.

        Raises:
            ConfigError: A file or a generator is wrong, or there are fewer problems than asked for.
        """
        chosen = self._config.validate_.held_out_sets[name]
        if chosen.path is None and not chosen.generators:
            return self.held_out(chosen.num_prompts or self._config.validate_.num_prompts)
        return self._prompts(f"held-out/{name}", held_out_problems(self._config, name))

    def pretraining(self, count: int) -> list[Prompt]:
        """Return the prompts whose responses the drafter is pretrained on."""
        return self._prompts("pretraining", self._problems.draw("pretraining", 0, count))

    def demonstrations(self, count: int) -> list[tuple[Prompt, str]]:
        """Return prompts, each with a response that earns full reward, with worked steps if there are any."""
        problems = self._problems.draw("demonstrations", 0, count)
        prompts = self._prompts("demonstrations", problems)
        return [(prompt, problem.demonstration) for prompt, problem in zip(prompts, problems, strict=True)]

    def check(self) -> None:
        """Draw the first training batch and all held-out and pretraining prompts, so that mistakes show early.

        Raises:
            ConfigError: A prompt is too long, or there are too few problems.
        """
        self.batch(0)
        self.held_out(self._config.validate_.num_prompts)
        for name in self._config.validate_.held_out_sets:
            self.validation(name)
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


def check_template(template: str) -> None:
    """Check `data.template`.

    Raises:
        ConfigError: It is neither `chat` nor a format string whose only field is `{prompt}`.
    """
    if template == CHAT:
        return
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ConfigError(f"data.template = {template!r}: {error}") from error
    if fields != {"prompt"}:
        raise ConfigError(f'data.template = {template!r}: it must contain {{prompt}} and no other field, or be "chat"')
