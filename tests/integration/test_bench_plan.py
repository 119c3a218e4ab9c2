"""The memory that the plan counts is what the parts of the train stage take (`specrl bench plan`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli import invoke
from specrl.rollout.vllm.default_engine import GROUP_VARIABLES


def test_planned_memory_is_within_a_tenth_of_what_small_runs_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in GROUP_VARIABLES:  # of a process group that a test before this one may have left listening
        monkeypatch.delenv(name, raising=False)
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    assert invoke(["bench", "plan", "--page", str(page), "--json", str(rows), "--threads", "1"]) == 0
    found = {row["name"]: row["planned"] / row["peak"] for row in json.loads(rows.read_text())}
    assert len(found) == 3
    assert {name: ratio for name, ratio in found.items() if not 0.9 <= ratio <= 1.1} == {}
    text = page.read_text()
    assert all(name in text for name in (*found, "policy update 1", "masters and Adam moments"))
