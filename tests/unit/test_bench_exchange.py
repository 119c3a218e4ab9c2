"""`specrl bench exchange` at a small size: both ways find the same, and the plan counts what was received."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrl.bench.exchange.cost import MISMATCH_BYTES, NUMBERS_BYTES, ExchangeShape, exchange_cost
from specrl.bench.exchange.main import main
from specrl.bench.job import BenchJob
from specrl.bench.settings import ExchangeSettings


def test_arrays_bring_less_than_pickled_rollouts_and_what_the_plan_counts(tmp_path: Path) -> None:
    settings = ExchangeSettings(responses=32, tokens=4000, repeats=1)
    page, rows_path = tmp_path / "page.md", tmp_path / "rows.json"
    main(BenchJob("", tmp_path, settings.model_dump(mode="json"), "specrl bench exchange", page, rows_path))
    rows = {(row["way"], row["rank"]): row for row in json.loads(rows_path.read_text())}
    assert len(rows) == 4
    for rank in range(2):
        arrays, pickled = rows["arrays", rank], rows["pickled", rank]
        found, expected = arrays["found"], pickled["found"]
        assert found["mismatch/token_mult_prob_error"] == pytest.approx(expected["token_mult_prob_error"], rel=1e-9)
        assert found["mismatch/bulk_error"] == pytest.approx(expected["bulk_error"], rel=1e-6)
        assert found["mismatch/importance_ratio_p99"] == pytest.approx(expected["p0.99"], rel=1e-3)
        assert sum(pickled["received"].values()) > 8 * sum(arrays["received"].values())
        assert arrays["received"]["mismatch"] == MISMATCH_BYTES + 8 * settings.ranks
        assert arrays["received"]["rollouts"] >= settings.responses // 2 * NUMBERS_BYTES
    shape = ExchangeShape(prompts=4, samples=8, prompt_tokens=256, response_tokens=4000, ranks=2)
    received = max(sum(rows["arrays", rank]["received"].values()) for rank in range(2))
    assert exchange_cost(shape, moved=0.0).received * 0.95 < received < exchange_cost(shape, moved=0.2).received
    assert "pickled / arrays" in page.read_text() and "1.000000" not in page.read_text()


def test_the_plan_counts_copies_for_shards_and_what_engines_hold_already() -> None:
    def cost(**layout: int) -> float:
        shape = ExchangeShape(prompts=64, samples=16, prompt_tokens=256, response_tokens=16_000, ranks=32, **layout)
        return exchange_cost(shape, moved=0.0).received

    alone = cost()
    assert cost(engine_size=4, tensor_parallel=4) == alone  # each rank of the engine has the tokens already
    assert cost(tensor_parallel=4) > 20 * alone  # three of four rows come from other engines of the same shards
    returned = 1024 / 16 / 2 * 16_000 * 4  # half of an engine's log-probs come back from another pipeline stage
    assert cost(engine_size=2, pipeline_parallel=2) == pytest.approx(alone + returned)
