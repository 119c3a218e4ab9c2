"""Converts conversations of data sets to the form of chat templates: a list of `role` and `content`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specrl.config import ConfigError
from specrl.data.formats.rows import structured

Message = dict[str, Any]
WRITTEN_BY_PYTHON = re.compile(r"\s*\[\s*\{'(?:role|content|from|value)'")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
"""The role names of ShareGPT and others, and those of chat templates."""
OWN = ("role", "from", "content", "value")
CHATS = ("messages", "conversations", "conversation")  # the columns in which data sets store chats
TOOLS = "tools"
"""The column with the callable functions, and the role of the entry that lists them before all messages."""


def read_messages(value: Any, row: Mapping[str, Any]) -> list[Message] | None:
    """The messages up to the last one not by the assistant; None if the value is no conversation."""
    value = structured(value)
    if isinstance(value, str) and WRITTEN_BY_PYTHON.match(value) and value.rstrip().endswith("}]"):
        raise ConfigError(
            "the messages are a Python list printed as text, as pandas writes it into CSV; save them as JSONL or "
            "Parquet"
        )
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        return None
    messages = list(map(_message, value))
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "system":
        raise ConfigError("messages has no request before the assistant's words")
    return messages


def tools_of(row: Mapping[str, Any]) -> list[Message]:
    """The functions that a row lets the model call, as JSON schemas in one entry before the messages, if any."""
    tools = structured(row.get(TOOLS))
    tools = [structured(tool) for tool in tools] if isinstance(tools, list) else []
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        return []  # an unrelated column
    return [{"role": TOOLS, "content": "", TOOLS: _given(tools)}]


def _given(value: Any) -> Any:
    """Drop the nulls that Parquet writes for members of other rows; arguments become objects, as in vLLM.

    Nulls inside arguments given as text are the call's own and stay.
    """
    if isinstance(value, list):
        return [_given(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: member for name, member in value.items() if member is not None}
    return {k: structured(v) if k == "arguments" and isinstance(v, str) else _given(v) for k, v in kept.items()}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role") or value.get("from"), str)


def _message(message: Message) -> Message:
    role = str(message.get("role") or message["from"]).lower()
    content = _text(message.get("content") if message.get("content") is not None else message.get("value"))
    kept = _given({name: value for name, value in message.items() if name not in OWN})
    if content is None and not kept.get("tool_calls"):
        raise ConfigError(f"the message of {role} has no content")
    return {"role": ROLES.get(role, role), "content": content or "", **kept}


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ConfigError(f"the content of a message has a part of type {kind}; only text can be asked")
        texts.append(text)
    return "\n".join(texts)
