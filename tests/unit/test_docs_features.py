"""The pages of features have one order, and what they name exists; the table of models says what the code says."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from specrl.config import Config, Section, load_config
from specrl.config.algorithms import Algorithm
from specrl.events import SIGNAL
from specrl.lineage.history import CHANGES
from specrl.metrics import METRICS, VALIDATION, find_metric
from specrl.models.families import FAMILIES, UNSUPPORTED
from specrl.projection.plan import plan
from specrl.report.projection import print_plan
from tests.contributing import blocks
from tests.unit.test_docs import BENCHMARKS, GUIDES, command_lines, exists, named, unknown_in

ROOT = Path(__file__).parents[2]
FEATURES = sorted((ROOT / "docs/features").glob("*.md"))
ORDER = ["What it is", "Enable it", "Knobs", "Commands", "Watch", "Measured", "Limits"]
SECTIONS = "|".join(field.alias or name for name, field in Config.model_fields.items() if name not in ("name", "seed"))
FILES = ("export",)
"""Groups of metrics that are also folders of a run, whose files look like metrics."""
GROUPS = "|".join({name.partition("/")[0] for name in METRICS} - set(FILES) | {"validation"})


def parts(page: Path) -> dict[str, str]:
    """Split a page at its headings."""
    found = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def code_words(text: str) -> list[str]:
    """List what stands between backticks within a line, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def default_of(key: str) -> str:
    """Write the default of a key as pages do: as JSON, or `unset`."""
    model: Any = Config
    *sections, name = key.split(".")
    for section in sections:
        fields = {field.alias or attribute: field for attribute, field in model.model_fields.items()}
        model = fields[section].annotation
    value = model.model_fields[name].get_default(call_default_factory=True, validated_data={})
    value = value.name if isinstance(value, Algorithm) else value
    return "unset" if value is None else f"`{json.dumps(value)}`"


@cache
def kinds_of_events() -> set[str]:
    """List the kinds with which the code records events."""
    found = {SIGNAL, *CHANGES}
    for path in [path for root in ("flows", "slurm", "specrl", "tasks") for path in (ROOT / root).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "record_event":
                found |= {str(kind.value) for kind in node.args[1:2] if isinstance(kind, ast.Constant)}
    return found


def wrong_metrics(text: str) -> Iterator[str]:
    """List the words that look like metrics and are none; `*` and `...` stand for any end."""
    known = [*METRICS, *(f"validation/SET/{name}" for name in VALIDATION)]
    for word in code_words(text):
        if re.fullmatch(rf"(?:{GROUPS})/[\w/*.-]*\w[\w*.-]*", word) is None:
            continue
        pattern = word.replace("...", "*")
        is_known = any(fnmatch(name, pattern) for name in known) if "*" in pattern else find_metric(numbered(word))
        if not is_known:
            yield word


def numbered(metric: str) -> str:
    """Put a number in place of the I at the end of a name."""
    return re.sub(r"_I$", "_1", metric)


@pytest.mark.parametrize("page", FEATURES, ids=named)
def test_every_page_of_a_feature_has_the_same_headings_in_the_same_order(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    assert list(parts(page)) == ORDER
    assert 50 <= len(text.splitlines()) <= 120


@pytest.mark.parametrize("page", FEATURES, ids=named)
def test_every_knob_of_a_feature_is_a_key_with_that_default(page: Path) -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", parts(page)["Knobs"], re.MULTILINE)
    assert rows
    assert [key for key, _ in rows if not exists(tuple(key.split(".")))] == []
    assert {key: default for key, default in rows if default != default_of(key)} == {}


@pytest.mark.parametrize("page", FEATURES, ids=named)
def test_every_page_of_a_feature_has_commands_and_says_what_to_watch(page: Path) -> None:
    sections = parts(page)
    assert any(line.startswith("specrl ") for line in command_lines(sections["Commands"]))
    words = code_words(sections["Watch"])
    assert any(find_metric(numbered(word)) for word in words if "/" in word) or "event `" in sections["Watch"]


def test_every_event_that_a_page_names_is_one_that_the_code_records() -> None:
    named_events = {
        (named(page), kind) for page in GUIDES for kind in re.findall(r"\bevents? `([\w ]+)`", page.read_text())
    }
    kinds = kinds_of_events()
    assert len(named_events) > 5
    assert {(page, kind) for page, kind in named_events if kind not in kinds} == set()


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_key_and_metric_within_a_sentence_exists(page: Path) -> None:
    text = page.read_text()
    words = "\n".join(word for word in code_words(text) if not word.endswith((".json", ".md", ".py")))
    keys = re.findall(rf"^((?:{SECTIONS})\.[a-z_.]+[a-z])(?: ?=.*)?$", words, re.MULTILINE)
    assert [key for key in keys if not exists(tuple(key.split(".")))] == []
    assert list(wrong_metrics(text)) == []


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_run_of_a_shipped_configuration_that_a_page_shows_is_a_valid_one(page: Path) -> None:
    for line in command_lines(page.read_text()):
        words = shlex.split(re.split(r" #| {4}", line, maxsplit=1)[0])[1:]
        if len(words) > 1 and words[0] == "run" and words[1].startswith("configs/"):
            load_config(ROOT / words[1], [value for name, value in pairwise(words) if name == "--set"])


def test_what_is_no_key_metric_or_event_is_found() -> None:
    text = "`spec/acceptance_lengths`, `spec/k`, `mismatch/...`, `bubble/*_s`, `export/policy`, `spec/*_none`"
    assert list(wrong_metrics(text)) == ["spec/acceptance_lengths", "spec/*_none"]
    assert not exists(("speculation", "kk"))
    assert default_of("drafter.loss") == '`"cross_entropy"`'
    assert default_of("cluster.max_segments") == "unset"
    assert "restart" in kinds_of_events() and "restarts" not in kinds_of_events()


def test_every_page_of_the_site_stands_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    listed = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(set(pages) - set(listed)) == []
    assert len(listed) == len(set(listed)) > 25


def test_the_plan_that_the_readme_shows_is_the_one_that_dry_run_prints() -> None:
    printed = StringIO()
    print_plan(plan(load_config(ROOT / "configs/qwen3-8b-rl-zero.toml")), {}, Console(file=printed, width=200))
    lines = {line.rstrip() for line in printed.getvalue().splitlines()}
    [shown] = re.findall(r"prints among other things:\n\n((?: {4}.*\n)+)", (ROOT / "README.md").read_text())
    rows = [line.removeprefix("    ").rstrip() for line in shown.splitlines()]
    assert len(rows) > 5
    assert [row for row in rows if row not in lines and row.strip() != "..."] == []


@pytest.mark.parametrize("page", BENCHMARKS, ids=named)
def test_a_page_whose_command_is_gone_says_of_which_revision_it_is(page: Path) -> None:
    gone = [line for line in command_lines(page.read_text()) if unknown_in(line)]
    assert not gone or re.search(r"\brevision [0-9a-f]{7}\b", page.read_text()), gone


def test_a_tutorial_of_a_family_shows_the_row_that_a_test_runs() -> None:
    page = (ROOT / "docs/guides/own-family.md").read_text()
    [shown] = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert shown in [block.text for block in blocks("A model family")]


@pytest.fixture(scope="module")
def model_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_page", ROOT / "docs/model_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_models_has_each_family_with_what_it_can_do(model_page: ModuleType) -> None:
    page = model_page.models()
    rows = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    assert FAMILIES.keys() | UNSUPPORTED.keys() <= rows.keys()
    cells = {name: [cell.strip() for cell in row.strip("|").split("|")] for name, row in rows.items()}
    assert cells["llama"][2:4] == ["yes", "no"]
    assert cells["mimo"][2:4] == ["no", "yes"]
    assert cells["mimo"][8:] == ["no", "none"]  # no tied embeddings, no scaled rotary embeddings
    assert cells["qwen3_moe"][4:8] == ["`linear_qkv`, `linear_proj`, `experts`", "TP, PP, EP", "in every layer", "no"]
    assert "`qwen3-8b-rl-zero.toml`" in rows["Qwen/Qwen3-8B-Base"]


def test_sections_of_the_configuration_are_those_that_pages_are_searched_for() -> None:
    assert {"speculation", "validate", "cluster"} <= set(SECTIONS.split("|"))
    assert all(issubclass(Config.model_fields[name].annotation, Section) for name in ("train", "drafter"))  # type: ignore[arg-type]
