"""What MkDocs adds to the pages beside this file: references written from the code, and pages from elsewhere in the project."""

from __future__ import annotations

import importlib
import json
import posixpath
import re
import types
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flows.cli import app
from specrl import metrics
from specrl.config import Config
from specrl.config.algorithms import ADVANTAGES, CORRECTIONS, DRAFT_LOSSES, LOSSES, Algorithm, Registry
from specrl.config.base import Section
from specrl.lineage.changes import is_adjustable

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/*")
"""The files outside of `docs` that the site has, under the same names."""
WIDTH = 100
"""The width in characters of the help texts."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and those from elsewhere."""
    for path in (path for pattern in ELSEWHERE for path in sorted(ROOT.glob(pattern))):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for name, content in (
        ("configuration", configuration_page()),
        ("commands", commands_page()),
        ("metrics", metrics_page()),
    ):
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside of `docs` lead to their copies in the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if target.startswith("docs/") or files.get_file_from_path(target) is None:
            return link[0]
        return f"]({posixpath.relpath(target, folder or '.')}"

    return re.sub(r"\]\((\.\./[^)#]+)", moved, markdown)


def configuration_page() -> str:
    """Write the sections of the configuration and the algorithms, from the models and their docstrings."""
    lines = [
        "# Configuration",
        "A run is described by a TOML file of the sections below; `specrl run CONFIG --set SECTION.KEY=VALUE` overrides a "
        "key. An unknown key, a wrong type and a combination that cannot run are errors of one line each, before anything "
        "is submitted. `configs/` has examples.",
        "● marks keys that [may change while a run goes on](../guides/change.md): training continues from its checkpoint. "
        "Keys of `[resources]`, `[stage_resources]`, `[cluster]` and `[tracking]` change no result and may always change.",
        *_section(Config, ()),
        "## Algorithms",
        "Each is chosen by its name, or by a table of `name` and the options below, as in "
        '`loss = { name = "grpo", clip_high = 0.28 }`. [CONTRIBUTING](../CONTRIBUTING.md) shows how to add one.',
    ]
    for registry in (LOSSES, ADVANTAGES, CORRECTIONS, DRAFT_LOSSES):
        lines += _algorithms(registry)
    return "\n\n".join(lines) + "\n"


def _section(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    rows, nested = [], []
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = _inner_section(field.annotation)
        if inner is not None:
            nested.append((inner, (*path, key)))
        if inner is None or path:
            rows.append(_row(key, field, (*path, key)))
    if path:
        yield f"{'#' * min(len(path) + 1, 3)} {'.'.join(path)}"
        yield _text(model.__doc__ or "")
    yield _table(("key", "type", "default", "", "meaning"), rows)
    for inner, where in nested:
        yield from _section(inner, where)


def _row(key: str, field: FieldInfo, path: tuple[str, ...]) -> tuple[str, ...]:
    mark = "●" if is_adjustable(".".join(path)) else ""
    default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
    return f"`{key}`", _type(field.annotation, field.metadata), default, mark, _text(field.description or "")


def _inner_section(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, alone, in a list or in a table of names."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner_section(part))), None)


def _type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], (*annotation.__metadata__, *metadata))
    if origin is Literal:
        return " or ".join(_value(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part, metadata) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list of {_type(parts[0])}"
    if origin is list:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return "table"
    if issubclass(annotation, Algorithm):
        return "name or table"
    if issubclass(annotation, Section):
        return "table"
    if issubclass(annotation, PurePath):
        return "path"
    name = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}[annotation.__name__]
    return f"{name}{_bounds(metadata)}"


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> str:
    constraints = [inner for item in metadata for inner in (getattr(item, "metadata", None) or [item])]
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    found = [f"{sign} {value:g}" for name, sign in signs for value in _bound(constraints, name)]
    return f" {', '.join(found)}" if found else ""


def _bound(constraints: list[Any], name: str) -> Iterator[float]:
    for constraint in constraints:
        value = getattr(constraint, name, None)
        if isinstance(value, int | float):
            yield value


def _value(value: Any) -> str:
    if value is None or isinstance(value, BaseModel) and not isinstance(value, Algorithm):
        return ""
    plain = value.name if isinstance(value, Algorithm) else str(value) if isinstance(value, PurePath) else value
    return f"`{json.dumps(plain, default=str)}`"


def _algorithms(registry: Registry) -> Iterator[str]:
    importlib.import_module(registry._home)
    yield f"### {registry.key}: functions"
    for name, registered in registry._by_name.items():
        yield f"**`{name}`** — {_text((registered.function.__doc__ or '').partition('Args:')[0])}"
        fields = registered.options.model_fields.items()
        if fields:
            rows = [
                (f"`{key}`", _type(field.annotation, field.metadata), _value(field.default), _text(field.description or ""))
                for key, field in fields
            ]
            yield _table(("option", "type", "default", "meaning"), rows)


def commands_page() -> str:
    """Write the help of every command."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="specrl", max_content_width=WIDTH, terminal_width=WIDTH)
    lines = ["# Commands", "What `specrl --help` and `specrl COMMAND --help` print.", *_help(group, context, 2)]
    return "\n\n".join(lines) + "\n"


def _help(command: Any, context: Any, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {context.command_path}"
    yield f"```text\n{command.get_help(context).rstrip()}\n```"
    for name, inner in getattr(command, "commands", {}).items():
        child = type(context)(inner, info_name=name, parent=context, max_content_width=WIDTH, terminal_width=WIDTH)
        yield from _help(inner, child, min(depth + 1, 3) if depth == 2 and context.parent else 2)


def metrics_page() -> str:
    """Write the definition of every metric, by group."""
    lines = ["# Metrics", _text((metrics.__doc__ or "").partition("\n\n")[2])]
    groups: dict[str, list[metrics.Metric]] = {}
    for metric in metrics.METRICS.values():
        groups.setdefault(metric.name.partition("/")[0], []).append(metric)
    groups["validation/NAME"] = list(metrics.VALIDATION.values())
    groups["other"] = [metrics.POLICY, *metrics.TEXT_SOURCE.values(), metrics.TOKEN_SHARE, metrics.BENCH, metrics.SYSTEM]
    for group, members in groups.items():
        rows = [(f"`{metric.name}`", metric.unit, metric.better or "", _text(metric.description)) for metric in members]
        lines += [f"## {group}", _table(("name", "unit", "better", "what is counted"), rows)]
    return "\n\n".join(lines) + "\n"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)


def _text(docstring: str) -> str:
    return " ".join(docstring.split())
