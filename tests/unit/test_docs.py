"""What README and the site name exists: keys, commands, files and links; each benchmark has a page."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli import app
from specrl.config import Config, Section

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.md"))
GUIDES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
"""What tells people what to write and to run."""
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *BENCHMARKS]
GENERATED = re.findall(r"reference/\w+\.md", (ROOT / "mkdocs.yml").read_text())


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def leaves(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the keys of a TOML table, those of its tables inside included."""
    for key, value in table.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, key))


def exists(keys: tuple[str, ...], model: Any = Config) -> bool:
    """Whether the configuration has a key; below what is no section, such as options of a loss, any will do."""
    if not keys:
        return True
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    if keys[0] not in fields:
        return False
    annotation = fields[keys[0]].annotation
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return exists(keys[1:], annotation)
    tables = re.findall(r"dict\[.*?(\w+)\]$", str(annotation).replace("typing.", ""))
    inner = [
        value for value in getattr(annotation, "__args__", ()) if isinstance(value, type) and issubclass(value, Section)
    ]
    return exists(keys[2:], inner[0]) if tables and inner else True


def toml_blocks(text: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def command_lines(text: str) -> list[str]:
    """List what the page says to call: lines of code blocks, and code within sentences."""
    text = re.sub(r" \\\n +", " ", text)
    fences = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    blocks = re.findall(r"^ {4}(specrl .+)$", text, re.MULTILINE) + re.findall(r"^(specrl .+)$", fences, re.MULTILINE)
    return [*blocks, *re.findall(r"`(specrl [^`]+)`", " ".join(text.split()))]


def unknown_in(line: str) -> list[str]:
    """List the commands, options and keys of a command line that do not exist."""
    words = shlex.split(re.sub(r"[\[\]]", " ", re.split(r" #| {4}", line, maxsplit=1)[0]), posix=True)[1:]
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        if words[0] in ("...", "COMMAND"):
            return []
        if words[0] not in command.commands:
            return [words[0]]
        command = command.commands[words.pop(0)]
    options = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
    found = [word for word in words if word.startswith("--") and word not in {*options, "--help"}]
    settings = [value for name, value in pairwise(words) if name in ("--set", "--vary")]
    keys = [setting.partition("=")[0] for setting in settings if setting[0].islower()]
    return [*found, *(key for key in keys if not exists(tuple(key.split("."))))]


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_configuration_on_a_page_has_keys_that_exist(page: Path) -> None:
    for block in toml_blocks(page.read_text()):
        assert [".".join(keys) for keys in leaves(tomllib.loads(block)) if not exists(keys)] == []


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=named)
def test_every_command_on_a_page_exists_with_its_options(page: Path) -> None:
    assert {line: unknown for line in command_lines(page.read_text()) if (unknown := unknown_in(line))} == {}


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=named)
def test_every_python_block_on_a_page_can_be_compiled(page: Path) -> None:
    for block in re.findall(r"^```python.*?\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        compile(block, named(page), "exec")


def test_every_target_of_make_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = r"(?:`|^(?: {4})?)make (?:-C \w+ )?([a-z-]+)"
    found = [name for page in PAGES for name in re.findall(called, page.read_text(), re.MULTILINE)]
    assert {"env", "quickstart"} <= set(found)
    assert [name for name in found if name not in targets] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[)#]", page.read_text())
    files = [link for link in links if "://" not in link]
    missing = [link for link in files if not (page.parent / link).exists()]
    assert [link for link in missing if link.removeprefix("../") not in GENERATED] == []


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=named)
def test_every_file_of_the_project_that_a_page_names_exists(page: Path) -> None:
    names = re.findall(
        r"`((?:specrl|flows|tasks|slurm|tests|configs|benchmarks|requirements)/[\w./-]+)`", page.read_text()
    )
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_invariant_of_the_design_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| \*\*.*$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    named = [re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", row) for row in rows]
    assert all(named)
    missing = [name for row in named for file, name in row if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


def test_what_does_not_exist_is_found() -> None:
    assert unknown_in("specrl ran configs/smoke.toml") == ["ran"]
    assert unknown_in("specrl run CONFIG --sett a=b") == ["--sett"]
    assert unknown_in("specrl run CONFIG --set policy.learning_rate=1") == ["policy.learning_rate"]
    assert unknown_in("specrl serve-model RUN [--port PORT]") == []
    assert not exists(("validate", "sets", "aime", "files"))
    assert exists(("validate", "sets", "aime", "path"))


def test_each_benchmark_has_one_undated_page_with_its_date_and_is_in_the_index() -> None:
    index = (ROOT / "benchmarks/README.md").read_text()
    for page in BENCHMARKS:
        if page.name != "README.md":
            text = page.read_text()
            assert not re.match(r"\d", page.name)
            assert re.search(r"20\d\d-\d\d-\d\d", "\n".join(text.split("\n")[:8])), f"{page.name} has no date"
            assert f"]({page.name})" in index
    pictures = {path.name for path in (ROOT / "benchmarks").iterdir() if path.suffix in (".svg", ".png")}
    shown = {name for page in BENCHMARKS for name in re.findall(r"\]\(([\w-]+\.(?:svg|png))\)", page.read_text())}
    assert pictures == shown


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1200


def test_every_message_that_troubleshooting_quotes_is_one_that_the_code_gives() -> None:
    sources = [path.read_text() for root in ("flows", "slurm", "specrl") for path in (ROOT / root).rglob("*.py")]
    page = (ROOT / "docs/guides/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 10
    for message in quoted:
        assert any(message in source for source in sources), message


def test_messages_name_settings_that_exist() -> None:
    fields = {field.alias or name: field.annotation for name, field in Config.model_fields.items()}
    sections = "|".join(name for name, kind in fields.items() if kind in Section.__subclasses__())
    for path in [path for root in ("flows", "slurm", "specrl") for path in (ROOT / root).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
        docstrings = {id(value) for value in statements if isinstance(value, ast.Constant)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for section, key in re.findall(rf"(?<![\w./])({sections})\.([a-z_]+)\b(?![./(])", node.value):
                    assert " " not in node.value or exists((section, key)), (
                        f"{named(path)}:{node.lineno}: {section}.{key}"
                    )
