"""Test that the first GPU's benchmark runs to its end on a GPU, with small models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.pipeline_runs import finish, specrl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def test_every_section_that_can_run_here_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    paths = ["--runs-dir", str(tmp_path / "runs"), "--page", str(tmp_path / "gpu.md")]
    finish(specrl("bench", "gpu", *paths, "--short"), seconds=1800)
    rows = json.loads(path.read_text())
    assert all(row["status"].startswith("done") for row in rows if "status" in row)
    assert all(row["unexplained"] == 0 for row in rows if "unexplained" in row)
