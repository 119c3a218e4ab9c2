"""What the site has beside docs/: reference pages generated from the code, and pages from elsewhere in the repository.

Links are written as they work in the repository; `on_page_markdown` makes them relative to the site.
"""

from __future__ import annotations

import importlib
import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from model_page import models
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.cli import app
from specrl.config import Config
from specrl.config.algorithms import ADVANTAGES, CORRECTIONS, DRAFT_LOSSES, LOSSES, Algorithm, Registry
from specrl.config.base import Section
from specrl.lineage.revision import adjustable_keys
from specrl.metrics import FAMILIES, METRICS

ROOT = Path(__file__).parents[1]
CONFIGURATION = """\
# Configuration

A configuration is a TOML file; `--set section.key=value` overrides a key. A wrong key, type or combination is reported
before anything is submitted, in one line that names the key and what is allowed. Keys with a \\* can be changed in a
run that has begun: `specrl resume RUN --set section.key=value`."""
ALGORITHMS = """\
## Algorithms

Select one by its name, or by a table of its name and options, such as `loss = { name = "grpo", clip_high = 0.28 }`.
[Extending](../CONTRIBUTING.md) shows how to add one."""
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "path", Algorithm: "string or table"}
SIGNS = {"gt": "> ", "ge": "≥ ", "lt": "< ", "le": "≤ "}
METRIC_PAGE = """\
# Metrics

These are the names in MLflow, TensorBoard and W&B, and in `stages/train-KEY/steps/*.json`. A speedup is a matched pair
(the same prompts, weights, seeds and machine, in turn) unless its description says otherwise. `_I` stands for a number,
such as a draft position or a batch size, and `NAME` for a name."""
LINK = re.compile(r"(\]\()([^)#:\s]+\.md)([)#])")


def generated() -> dict[str, str]:
    """Write each page of the reference, by its path in the site."""
    return {
        "reference/configuration.md": configuration(),
        "reference/commands.md": commands(),
        "reference/metrics.md": metrics(),
        "reference/models.md": models(),
    }


def mirrored() -> list[str]:
    """List the files outside docs/ that the site has, relative to the repository."""
    pages = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
    return [*pages, *sorted(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").iterdir())]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    for path in mirrored():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    elsewhere = mirrored()
    here = page.file.src_uri if page.file.src_uri in elsewhere else f"docs/{page.file.src_uri}"

    def in_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        site = target.removeprefix("docs/")
        return match[1] + posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    return LINK.sub(in_site, markdown)


def configuration() -> str:
    """Write a table of every section's keys, from the docstrings below the fields."""
    adjustable = set(adjustable_keys())
    parts = [CONFIGURATION]
    for name, section in sections(Config, ""):
        title = f"`[{name}]`" if name else "Top level"
        parts += [
            f"## {title}",
            inspect.cleandoc(section.__doc__ or ""),
            "| key | type | default | meaning |\n|---|---|---|---|",
        ]
        for attribute, field in section.model_fields.items():
            if isinstance(field.default, Section) or (not name and any(sections_in(field.annotation))):
                continue  # it has a table of its own
            key = field.alias or attribute
            star = "\\*" if f"{name}.{key}" in adjustable else ""
            row = (f"`{key}`{star}", allowed(field), default(field), field.description or "")
            parts[-1] += "\n| " + " | ".join(cell(text) for text in row) + " |"
    parts.append(ALGORITHMS)
    for registry in (LOSSES, ADVANTAGES, CORRECTIONS, DRAFT_LOSSES):
        parts.append(f"### `{registry.key}`\n\n| name | option | type | default | meaning |\n|---|---|---|---|---|")
        parts[-1] += "".join(f"\n| {' | '.join(cell(text) for text in row)} |" for row in algorithms(registry))
    return "\n\n".join(parts) + "\n"


def algorithms(registry: Registry) -> Iterator[tuple[str, ...]]:
    """List the functions of a registry, each followed by its options."""
    importlib.import_module(registry._home)  # registers them
    for name, registered in registry._by_name.items():
        yield f"**`{name}`**", "", "", "", (registered.function.__doc__ or "").partition("Args:")[0]
        for option, field in registered.options.model_fields.items():
            yield "", f"`{option}`", allowed(field), default(field), field.description or ""


def sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """Walk a section and those inside it, each with its TOML header."""
    yield prefix, section
    for name, field in section.model_fields.items():
        for inner, suffix in sections_in(field.annotation):
            yield from sections(inner, ".".join(filter(None, (prefix, field.alias or name))) + suffix)


def sections_in(annotation: Any) -> Iterator[tuple[type[Section], str]]:
    """Find the sections in a field's type, with `.NAME` where the field is a table of them."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, Section):
            yield annotation, ""
        return
    keyed = ".NAME" if get_origin(annotation) is dict else ""
    for argument in get_args(annotation):
        for section, suffix in sections_in(argument):
            yield section, keyed + suffix


def type_name(annotation: Any) -> str:
    """Write a type as it is in TOML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        takes_one = get_origin(arguments[0]) is tuple and any(isinstance(item, BeforeValidator) for item in arguments)
        return "string or " * takes_one + type_name(arguments[0])
    if origin is UnionType or str(origin) == "typing.Union":
        return " or ".join(type_name(argument) for argument in arguments if argument is not type(None))
    if str(origin) == "typing.Literal":
        return " or ".join(f'"{argument}"' if isinstance(argument, str) else str(argument) for argument in arguments)
    if origin is dict:
        return "table of tables" if is_table(arguments[1]) else "table"
    if origin is tuple:
        number = "" if Ellipsis in arguments else f"{len(arguments)} "
        return f"list of {number}{type_name(arguments[0])}s"
    return "table" if is_table(annotation) else TYPES[annotation]


def is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def allowed(field: FieldInfo) -> str:
    """Write a field's type and the limits of its value."""
    constraints = [inner for item in field.metadata for inner in getattr(item, "metadata", [item])]
    limits = [
        f"{sign}{limit if isinstance(limit, int) else f'{limit:g}'}"
        for item in constraints
        for name, sign in SIGNS.items()
        if (limit := getattr(item, name, None)) is not None
    ]
    return " ".join([f"`{type_name(Annotated[field.annotation, *field.metadata, None])}`", ", ".join(limits)]).strip()


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, Algorithm):
        value = value.name
    if isinstance(value, Path):
        value = str(value)
    is_plain = isinstance(value, str | int | float) or (isinstance(value, tuple) and not any(map(is_section, value)))
    return f"`{json.dumps(value)}`" if is_plain else ""


def is_section(value: Any) -> bool:
    return isinstance(value, Section)


def commands() -> str:
    """Write every command's usage and options, from typer."""
    parts = ["# Commands", "`specrl COMMAND --help` prints the same."]
    for name, command in walk(typer.main.get_command(app), "specrl"):
        usage = command.collect_usage_pieces(click.Context(command, info_name=name))
        parts += [f"## {name}", "    " + " ".join([name, *usage]), plain(command.help or "")]
        rows = [
            f"| `{label(parameter)}` | {cell(plain(getattr(parameter, 'help', None) or ''))} |"
            for parameter in command.params
            if parameter.name != "help"
        ]
        if rows:
            parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def label(parameter: Any) -> str:
    """Write an option with its other names, and an argument in capitals."""
    if parameter.param_type_name == "option":
        return ", ".join([*parameter.opts, *parameter.secondary_opts])
    return str(parameter.metavar or parameter.name).upper()


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """List the commands below `command`, depth first."""
    for inner_name, inner in getattr(command, "commands", {}).items():
        if hasattr(inner, "commands"):
            yield from walk(inner, f"{name} {inner_name}")
        else:
            yield f"{name} {inner_name}", inner


def metrics() -> str:
    """Write a table of the metrics of each group."""
    groups: dict[str, list[str]] = {}
    for metric in [*METRICS.values(), *FAMILIES]:
        row = f"| `{metric.name}` | {metric.unit} | {cell(metric.description)} | {metric.better or ''} |"
        groups.setdefault(metric.name.partition("/")[0], []).append(row)
    columns = "| metric | unit | meaning | better |\n|---|---|---|---|"
    tables = ["\n".join([f"## {group}\n", columns, *rows]) for group, rows in groups.items()]
    return "\n\n".join([METRIC_PAGE, *tables]) + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def plain(text: str) -> str:
    return text.replace("\b", "").replace("\f", "").strip()
