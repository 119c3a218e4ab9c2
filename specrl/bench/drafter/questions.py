"""The prompts that a drafter is measured on: a local JSONL file of questions, which may have categories."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specrl.config import ConfigError
from specrl.data.problems import derive_seed
from specrl.data.rendering import CHAT, check_template
from specrl.data.rows import read_objects

COLUMNS = ("prompt", "question", "turns", "messages")
"""The columns in which a question is looked for."""
CATEGORY, UNNAMED = "category", "all"
"""The column of the category, and the category of a row without one."""


@dataclass(frozen=True)
class Question:
    """A prompt, ready to be sent to the engine."""

    id: int
    """A 63-bit hash of its place and text."""
    tokens: list[int]
    category: str


def read_questions(
    path: Path, template: str | None, tokenizer: Any, longest: int, count: int
) -> tuple[list[Question], int]:
    """Read up to `count` questions, as many of each category as possible, and count the rows that were too long.

    A question is text, a list of turns, of which the first is asked, or a list of chat messages, which is cut after
    its last message by the user.

    Args:
        template: As `data.template`; None for the tokenizer's chat template, or the bare question where it has none.
        tokenizer: The policy's tokenizer, of transformers.
        longest: The longest prompt, in tokens.
    """
    if template is None:
        template = CHAT if tokenizer.chat_template else "{prompt}"
    check_template(template)
    if template == CHAT and not tokenizer.chat_template:
        raise ConfigError("--template chat: the policy's tokenizer has no chat template; give a format string")
    by_category: dict[str, list[Question]] = {}
    too_long = 0
    for place, row in read_objects(path):
        tokens = _tokens(tokenizer, template, _messages(place, row))
        category = str(row.get(CATEGORY) or UNNAMED)
        if len(tokens) > longest:
            too_long += 1
            continue
        by_category.setdefault(category, []).append(Question(derive_seed("question", place), tokens, category))
    if not by_category:
        why = f"all {too_long} prompts have more than {longest} tokens" if too_long else "it is empty"
        raise ConfigError(f"data file {path}: {why}")
    turns = zip_longest(*by_category.values())
    spread = [question for turn in turns for question in turn if question is not None][:count]
    return sorted(spread, key=lambda question: question.category), too_long


def _messages(place: str, row: dict[str, Any]) -> list[dict[str, str]]:
    value = next((row[name] for name in COLUMNS if name in row), None)
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str) and value.strip():
        return [{"role": "user", "content": value}]
    messages = value if isinstance(value, list) and all(_is_message(part) for part in value) else []
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ConfigError(
            f"{place} has no question in {' or '.join(COLUMNS)}: it must be text, a list of turns, or chat messages "
            "with role and content"
        )
    return [{"role": part["role"], "content": part["content"]} for part in messages[: last + 1]]


def _is_message(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(key), str) for key in ("role", "content"))


def _tokens(tokenizer: Any, template: str, messages: list[dict[str, str]]) -> list[int]:
    if template == CHAT:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(template.format(prompt=messages[-1]["content"])))
