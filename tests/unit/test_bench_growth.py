"""How `specrl bench growth` fits exponents and compares them with the arithmetic, and what its page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.bench import arithmetic
from specrl.bench.arithmetic import Machine
from specrl.bench.growth.fit import Growth, PointTimes, exponent, growth
from specrl.bench.growth.page import write_page
from specrl.bench.growth.points import MODELS, Point, series_of
from specrl.bench.job import BenchJob
from specrl.bench.settings import GrowthSettings

TINY, MACHINE = MODELS["tiny"], Machine(bytes_per_s=1e10, flops_per_s=1e11)


def test_exponents_are_those_of_the_times() -> None:
    assert exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert exponent([64, 256], [5, 5]) == pytest.approx(0)


def test_every_series_grows_in_one_size_alone() -> None:
    found = {series.name: series.points for series in series_of(GrowthSettings(lengths=(256, 64), models=()))}
    assert list(found) == ["response tokens", "responses to a prompt", "ranks"]
    assert list(found["response tokens"]) == [64, 256]
    assert {(point.prompts, point.samples) for point in found["ranks"].values()} == {(4, 4)}


def test_the_arithmetic_grows_as_its_terms_do() -> None:
    """Products are linear in the tokens, attention over a sequence is quadratic, the optimizer depends on neither."""
    assert arithmetic.products_s(TINY, 200, MACHINE) == 2 * arithmetic.products_s(TINY, 100, MACHINE)
    lengths = exponent([1e3, 1e4], [arithmetic.attention_s(TINY, [length], MACHINE) for length in (1000, 10000)])
    assert lengths == pytest.approx(2, abs=0.01)
    weights = TINY.num_layers * TINY.linear_parameters_per_layer + TINY.embedding_parameters
    assert arithmetic.products_s(TINY, 1, MACHINE) == 2 * weights / 1e11
    few = arithmetic.update_s(TINY, [1], [1], MACHINE)
    assert few == pytest.approx(TINY.parameters * 28 / 1e10, rel=0.05)
    # Two requests that run side by side read the weights once, as one does.
    one, two = (arithmetic.generation_s(TINY, [8] * n, [512] * n, MACHINE) for n in (1, 2))
    assert one < two < 1.5 * one


def times(size: float, update_s: float, other_s: float) -> PointTimes:
    seconds = {"step": update_s + other_s, "policy_update": update_s, "drafter_update": 0.0, "other": other_s}
    return PointTimes(
        size, Point(response_tokens=int(size)), seconds, {"policy_update": size / 1e3, "step": size / 1e3}
    )


def test_the_page_names_what_grows_faster_than_its_arithmetic(tmp_path: Path) -> None:
    points = [times(64, 0.1, 0.001), times(256, 0.4, 0.04), times(1024, 6.4, 0.04)]
    found = {item.part: item for item in growth("response tokens", points)}
    assert list(found) == ["step", "policy_update", "other"]  # nothing of a drafter that is not there
    assert found["policy_update"].last == pytest.approx(2) and found["policy_update"].least == pytest.approx(1)
    assert [part for part, item in found.items() if item.too_fast] == ["step", "policy_update"]
    assert not Growth("ranks", "refit", 1.0, 9.0, 0.0, seconds=0.01).too_fast  # too short to be judged
    job = BenchJob("", tmp_path, {}, "specrl bench growth", tmp_path / "page.md", tmp_path / "rows.json")
    write_page(job, {"response tokens": points}, list(found.values()))
    text = job.page.read_text()
    assert "faster than its arithmetic: step with response tokens, policy update with response tokens." in text
    assert "| 1024 | 6.44 (1.02) | 6.40 (1.02) | 0.04 |" in text
    assert "| policy update | 1.50 | **2.00** | 1.00 |" in text
