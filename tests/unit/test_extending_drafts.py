"""The recipe of CONTRIBUTING.md for a draft source: a row is all that configuration and benchmarks need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import invoke
from specrl.bench.options import RolloutOptions
from specrl.bench.rollouts.engines import speculation_of
from specrl.config import ConfigError, load_config, parse_config
from specrl.config.methods import METHODS, DraftMethod
from specrl.metrics import find_metric
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DraftOutcome, SpeculationStats
from specrl.rollout.drafts.text_sources import text_sources
from specrl.step_record import speculation_metrics
from tests.drafts import recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module", autouse=True)
def rows(folder: Path) -> Iterator[dict[str, DraftMethod]]:
    with recipe(folder) as rows:
        yield rows


def test_a_row_is_a_value_of_the_option_and_a_method_of_the_benchmark(rows: dict[str, DraftMethod]) -> None:
    assert list(rows) == ["ngram8", "repetition"]
    for name, row in rows.items():
        config = parse_config({"name": "run", "speculation": {"method": name}})
        assert config.speculation.draft_method is row
        assert name in RolloutOptions((), (1,), (1,), 1, 1).methods_of(config)
        assert speculation_of(config.speculation, name, 5).method == name
        with pytest.raises(ConfigError, match=f'"{name}" must be one of eagle3'):
            parse_config({"name": "run", "speculation": {"method": name}, "bubbles": {"use": "train_drafter"}})
    with pytest.raises(ConfigError, match=r'speculation.method = "medusa": allowed: none, .*, ngram8, repetition$'):
        parse_config({"name": "run", "speculation": {"method": "medusa"}})


def test_a_dry_run_knows_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert invoke(["run", "repetition.toml", "--dry-run"]) == 0


def test_lengths_follow_from_what_the_method_drafts_from(folder: Path) -> None:
    assert load_config(folder / "repetition.toml").speculation.draft_lengths == (0, 8)
    ngram = parse_config({"name": "run", "speculation": {"method": "ngram8", "k": 5}})
    assert ngram.speculation.draft_lengths == (5, 0)


def test_the_class_is_made_for_the_engine_and_its_cursors_follow_responses(folder: Path) -> None:
    [source] = text_sources(load_config(folder / "repetition.toml").speculation, ControlSettings())
    cursor = source.cursor([9, 1, 2, 3], seed=0)
    assert cursor is not None
    cursor.advance([4])
    assert cursor.draft(6) == [1, 2, 3, 4, 1, 2]
    assert cursor.agreement


def test_its_drafts_are_logged_under_its_name() -> None:
    stats = SpeculationStats.of([DraftOutcome("repetition", drafted=4, accepted=3, agreement=1)])
    metrics = speculation_metrics(stats)
    assert (metrics["spec/repetition_draft_tokens"], metrics["spec/repetition_accepted_tokens"]) == (4.0, 3.0)
    assert all(find_metric(name) is not None for name in metrics)


def test_every_row_of_the_table_is_complete() -> None:
    for name, row in METHODS.items():
        assert row.name == name
        assert row.drafts == (name != "none")
        assert row.model is None or row.vllm is not None
        assert not (row.has_weights and not row.reads_every_token)
