"""Test that the first GPU's benchmark runs to its end on a GPU, at tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.pipeline_runs import finish, specrl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_every_section_that_can_run_here_ends_well(tmp_path: Path) -> None:
    rows = tmp_path / "gpu.json"
    paths = ["--runs-dir", str(tmp_path / "runs"), "--page", str(tmp_path / "gpu.md"), "--json", str(rows)]
    finish(specrl("bench", "gpu", *paths, "--tiny"), seconds=1800)
    records = {record["section"]: record for record in json.loads(rows.read_text())}
    assert {record["status"] for record in records.values()} <= {"done", "missing"}
    if records["exactness"]["status"] == "done":
        figures = records["exactness"]["findings"]["figures"]
        assert all(value == 0 for name, value in figures.items() if name.endswith("unexplained"))
    if records["sleep"]["status"] == "done":
        assert records["sleep"]["findings"]["figures"]["same_tokens"]
