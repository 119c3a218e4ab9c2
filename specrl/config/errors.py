"""The messages for a wrong configuration: one line per mistake, with the key, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import reduce
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from specrl.config.text import NAME, redacted

SCALARS = ("int", "float", "str", "bool")
"""Pydantic's names for the members of a union of plain types."""


def explain(error: ValidationError, root: type[BaseModel], where: tuple[str, ...] = ()) -> str:
    """One line per distinct mistake found in validating a `root`; `where` is the path of keys to it."""
    # The items of a list that fits no member of a union are not reported apart from it.
    whole = (one for one in error.errors() if not any(str(part).startswith("list[") for part in one["loc"][:-1]))
    return "\n".join(dict.fromkeys(_line(problem, root, where) for problem in whole))


def _line(problem: Any, root: type[BaseModel], where: tuple[str, ...]) -> str:
    within = [part for part in problem["loc"] if part != "[key]"]
    value = problem["input"]
    path, given = [*where, *within], redacted(value.isoformat() if hasattr(value, "isoformat") else repr(value))
    last = str(path[-1]) if path else ""
    if last in SCALARS or last.startswith("list["):
        # The value fits no member of a union: pydantic reports each member, but the user needs one line.
        return f"{_join(path[:-1])} = {given}: allowed: a number, a string, true, false, or a list of them"
    key = _join(path) or "config"
    if problem["type"] == "extra_forbidden":
        allowed = _allowed(root, within[:-1])
        close = get_close_matches(str(path[-1]), allowed.split(", "), 1) or _elsewhere(root, str(path[-1]))
        meant = f"; perhaps {' or '.join(close)}" if close else ""
        return f"{key}: unknown key; allowed here: {allowed}{meant}"
    if problem["type"] == "missing":
        return f"{key}: required, but not given"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{key} = {given}: this is a section, not a value; its keys: {_allowed(root, within)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"].startswith(("int_", "float_")) and (said := _description(root, within)):
        message += f"; it is: {said}"
    if problem["type"] == "tuple_type":
        message = f"it must be a list, such as [{given}]"
    elif problem.get("ctx", {}).get("pattern") == NAME:
        message = "allowed: letters, digits, ., _ and -, with a letter or a digit first"
    if problem["type"] == "value_error":
        # Messages that name their keys in full need no prefix.
        named = key == "config" or message.startswith(f"{path[0]}.")
        return message if named else f"{key}: {message}"
    return f"{key} = {given}: {message[0].lower()}{message[1:]}"


def _join(path: Iterable[Any]) -> str:
    return ".".join(str(part) for part in path)


def _allowed(root: type[BaseModel], path: list[Any]) -> str:
    annotation = reduce(_descend, path, root)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ", ".join(field.alias or name for name, field in annotation.model_fields.items())
    if get_origin(annotation) is dict:
        return ", ".join(str(key) for key in get_args(get_args(annotation)[0])) or "any"
    return "none"


def _elsewhere(root: type[BaseModel], name: str) -> list[str]:
    """Keys with this name in all sections of the configuration."""
    sections = {key: _plain(field.annotation) for key, field in root.model_fields.items()}
    return [f"{key}.{name}" for key, section in sections.items() if name in getattr(section, "model_fields", {})]


def _description(root: type[BaseModel], path: list[Any]) -> str:
    """The first sentence of a key's documentation, with its unit."""
    field = getattr(reduce(_descend, path[:-1], root), "model_fields", {}).get(path[-1]) if path else None
    return " ".join((field.description or "").split()).partition(". ")[0].rstrip(".") if field is not None else ""


def _descend(annotation: Any, part: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
        return _plain(fields[part].annotation)
    members = get_args(annotation)
    return _plain(members[1] if get_origin(annotation) is dict else members[0])


def _plain(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _plain(next(member for member in get_args(annotation) if member is not type(None)))
    return annotation
