"""How questions become prompts: the template, the tokens, and the rule for prompts that are too long."""

from __future__ import annotations

import re
import string
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError

from specrl.config import Config, ConfigError
from specrl.data.formats.messages import TOOLS, Message
from specrl.data.problems import Counts, Misfit, Problem, misfit_of

CHAT = "chat"  # in `data.template`: the tokenizer's chat template
TOKENS_PER_BYTE = 3  # a token covers at least one byte, and NFC turns one into at most three
MOST_SPECIAL = 16  # tokens that a tokenizer may add to a text
TODAY = date(2024, 7, 26)
"""The date for templates that write one, so that a run's prompts do not change from day to day; Llama's templates use
it as their default."""
TURN = "words of a turn"  # placeholder for a turn, where only what follows matters
CHUNK = 1000  # prompts per call of the tokenizer
LONGEST_TOKEN = 64  # characters per token, at most, when a question is cut; if longer, less is kept than would fit


class Rendering:
    """Turns questions into prompts; depends only on the configuration and the tokenizer."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._template, self._rule, self.limit = config.data.template, config.data.overlong, config.max_prompt_tokens
        self._tokenizer = tokenizer
        normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else ...
        self._bounded = type(normalizer).__name__ in ("NoneType", "NFC")  # few bytes are few tokens
        # A tokenizer saved for fine-tuning ends each text, after which nothing could follow.
        self._ends_texts = tokenizer("a", verbose=False)["input_ids"][-1:] == [tokenizer.eos_token_id]
        check_template(self._template)
        if self._template == CHAT and not tokenizer.chat_template:
            raise ConfigError('data.template = "chat": the tokenizer has no chat template; give a format string')
        self._system, self._arguments = config.data.system_prompt, config.data.chat_template_kwargs
        check_chat_template(str(tokenizer.chat_template or ""), self._arguments)

    def text(self, question: str, context: Sequence[Message] = ()) -> str:
        """Apply the template to a question; in a format string, the question follows the messages before it."""
        return self.opening([*context, {"role": "user", "content": question}])

    def opening(self, messages: Sequence[Message]) -> str:
        """The prompt of a conversation that starts with these messages."""
        if self._template != CHAT:
            return in_format(self._template, messages)
        has_system = any(message["role"] in ("system", "developer") for message in messages)
        system = [{"role": "system", "content": self._system}] if self._system and not has_system else []
        text = self._of_chat([*system, *messages])
        other = [{**message, "content": TURN} for message in system if str(self._system).strip() not in text]
        if other and text == self._of_chat([*other, *messages]):  # a template may also drop a part of it
            raise ConfigError(
                "the tokenizer's chat template leaves data.system_prompt out: write it into the questions"
            )
        *before, last = messages
        if last["content"].strip() not in text and text == self._of_chat([*system, *before, {**last, "content": TURN}]):
            raise ConfigError(
                "the tokenizer's chat template leaves the question out, as one for images does, which wants content in "
                "parts: take the template of the language model"
            )
        return text

    def between(self, messages: Sequence[Message], last: int) -> tuple[str, list[int]]:
        """The text and tokens between two turns of the policy when an environment writes these messages.

        With a chat template, they start with the end of the policy's turn, unless `last`, its last token, is that.
        """
        if self._template != CHAT:
            text = "".join(message["content"] for message in messages)
        else:
            turn = [{"role": "user", "content": TURN}, {"role": "assistant", "content": TURN}]
            parts = self._of_chat([*turn, *messages]).split(TURN, 2)
            if len(parts) < 3:
                raise ConfigError("the tokenizer's chat template does not show the turns of a conversation as they are")
            text = parts[2]
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return text, tokens[1:] if self._template == CHAT and tokens[:1] == [last] else tokens

    def chat(self, request: str | list[Message]) -> str:
        """The text of a request, by the tokenizer's chat template or as concatenated messages."""
        messages = [{"role": "user", "content": request}] if isinstance(request, str) else request
        if self._tokenizer.chat_template or messages[0]["role"] == TOOLS:
            return self._of_chat(messages)
        return "".join(f"{message['content']}\n" for message in messages)

    def _of_chat(self, messages: list[Message]) -> str:
        tools = next((message[TOOLS] for message in messages if message["role"] == TOOLS), None)
        messages = [message for message in messages if message["role"] != TOOLS]
        if tools and not re.search(rf"\b{TOOLS}\b", str(self._tokenizer.chat_template)):
            raise ConfigError("the tokenizer's chat template does not read tools; leave the column out")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    strftime_now=TODAY.strftime,
                    **self._arguments,
                )
            )
        except (TemplateError, LookupError, TypeError, ValueError) as error:  # templates are small programs
            raise ConfigError(f"the tokenizer's chat template refuses it: {' '.join(str(error).split())}") from error

    def tokens(self, text: str, *, of_chat: bool = False) -> list[int]:
        """Tokenize a prompt's text; with `of_chat`, text returned by `chat`."""
        return self._encode([text], of_chat=of_chat)[0]

    def fit(self, problems: Sequence[Problem], counts: Counts) -> list[Problem | Misfit]:
        """Turn problems into prompts as `data.overlong` says, with a `Misfit` in place of those that do not fit."""
        fitted: list[Problem | Misfit] = []
        for start in range(0, len(problems), CHUNK):
            chunk = [(problem, self._renderable(problem, counts)) for problem in problems[start : start + CHUNK]]
            long = [text for _, text in chunk if isinstance(text, str) and not self._surely_fits(text)]
            lengths = dict(zip(long, map(len, self._encode(long)), strict=True))
            for problem, text in chunk:
                if isinstance(text, Misfit):
                    fitted.append(text)
                else:
                    fitted.append(self._judge(problem, lengths[text], counts) if text in lengths else problem)
        return fitted

    def _surely_fits(self, text: str) -> bool:
        return self._bounded and TOKENS_PER_BYTE * len(text.encode()) + MOST_SPECIAL <= self.limit

    def _renderable(self, problem: Problem, counts: Counts) -> str | Misfit:
        counts.seen += 1
        try:
            found = misfit_of(problem) or self.text(problem.question, problem.context)
        except ConfigError as error:
            found = Misfit(str(error))
        counts.unusable += isinstance(found, Misfit)
        return found

    def _judge(self, problem: Problem, length: int, counts: Counts) -> Problem | Misfit:
        counts.longest = max(counts.longest, length)
        if not length:
            counts.unusable += 1
            return Misfit("its prompt has no tokens")
        if length <= self.limit:
            return problem
        counts.overlong += 1
        text = f"its prompt has {length} tokens, and at most {self.limit} are allowed (data.max_prompt_tokens)"
        if self._rule == "drop":
            return Misfit(text, dropped=True)
        if self._rule == "error":
            text += '; data.overlong = "drop", "truncate_left" or "truncate_right" would take care of it'
            return Misfit(text)
        return self._truncated(problem)

    def _truncated(self, problem: Problem) -> Problem | Misfit:
        question, left = problem.question, self._rule == "truncate_left"
        room = self.limit * LONGEST_TOKEN
        question = question[-room:] if left else question[:room]

        def kept(count: int) -> str:
            return question[len(question) - count :] if left else question[:count]

        def is_too_long(count: int) -> bool:
            return len(self.tokens(self.text(kept(count), problem.context))) > self.limit

        fits = bisect_left(range(1, len(question) + 1), True, key=is_too_long)
        if not kept(fits).strip():
            return Misfit(
                f"data.template leaves no room for a question within {self.limit} tokens (data.max_prompt_tokens)"
            )
        return replace(problem, question=kept(fits))

    def _encode(self, texts: Sequence[str], *, of_chat: bool = False) -> list[list[int]]:
        if not texts:
            return []
        # A chat template writes its special tokens itself, and so may a format string.
        special = self._template != CHAT and not (of_chat and self._tokenizer.chat_template)
        encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=special, verbose=False)["input_ids"]
        twice, end = [self._tokenizer.bos_token_id] * 2, -1 if special and self._ends_texts else None
        return [tokens[1 if special and tokens[:2] == twice else 0 : end] for tokens in encoded]


def check_chat_template(template: str, arguments: Iterable[str]) -> None:
    """Check a tokenizer's chat template, and that it uses `data.chat_template_kwargs`."""
    try:
        # transformers adds a tag that marks the assistant's words.
        own = re.sub(r"{%-? *(end)?generation *-?%}", "", template)
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(own)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the tokenizer's chat template is wrong in line {error.lineno}: {error.message}") from error
    for name in arguments:
        if template and not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(f"data.chat_template_kwargs.{name}: the tokenizer's chat template does not read it")


def in_format(template: str, messages: Sequence[Message]) -> str:
    """The prompt of a conversation by a format string."""
    return template.format(prompt="\n".join(message["content"] for message in messages))


def check_template(template: str) -> None:
    """Refuse a `data.template` other than `chat` or a format string whose only field is `{prompt}`."""
    if template == CHAT:
        return
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if fields == {"prompt"}:
            template.format(prompt="")
            return
    except (ValueError, LookupError) as error:
        raise ConfigError(f"data.template = {template!r}: {error}") from error
    raise ConfigError(
        f'data.template = {template!r}: it must contain {{prompt}} and no other field, or be "chat"; braces that stand '
        "for themselves are written twice, as in {{ and }}"
    )
