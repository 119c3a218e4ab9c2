"""The recipe of CONTRIBUTING.md for a draft source: a row is all that configuration and benchmarks need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import invoke
from specrl.bench.options import RolloutOptions
from specrl.bench.rollouts.engines import speculation_of
from specrl.config import ConfigError, load_config, parse_config
from specrl.config.methods import METHODS, DraftMethod
from tests.drafts import recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module", autouse=True)
def rows(folder: Path) -> Iterator[dict[str, DraftMethod]]:
    with recipe(folder) as rows:
        yield rows


def test_a_row_is_a_value_of_the_option_and_a_method_of_the_benchmark(rows: dict[str, DraftMethod]) -> None:
    assert list(rows) == ["ngram8", "ngram8+replay"]
    for name, row in rows.items():
        config = parse_config({"name": "run", "speculation": {"method": name}})
        assert config.speculation.draft_method is row
        assert name in RolloutOptions((), (1,), (1,), 1, 1).methods_of(config)
        assert speculation_of(config.speculation, name, 5).method == name
        with pytest.raises(ConfigError, match=f'"{re.escape(name)}" must be one of eagle3'):
            parse_config({"name": "run", "speculation": {"method": name}, "bubbles": {"use": "train_drafter"}})
    with pytest.raises(ConfigError, match=r'speculation.method = "medusa": allowed: none, .*, ngram8, ngram8\+replay$'):
        parse_config({"name": "run", "speculation": {"method": "medusa"}})


def test_a_dry_run_knows_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert invoke(["run", "lookups.toml", "--dry-run"]) == 0


def test_lengths_follow_from_what_the_method_drafts_from(folder: Path) -> None:
    assert load_config(folder / "lookups.toml").speculation.draft_lengths == (3, 8)
    ngram = parse_config({"name": "run", "speculation": {"method": "ngram8", "k": 5}})
    assert ngram.speculation.draft_lengths == (5, 0)


def test_every_row_of_the_table_is_complete() -> None:
    for name, row in METHODS.items():
        assert row.name == name
        assert row.drafts == (name != "none")
        assert row.model is None or row.vllm is not None
