"""Traces of whole steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from specrl.timeline import Timer
from specrl.training.traces import traced


def test_a_step_that_is_asked_for_leaves_a_trace_of_its_parts_and_operators(tmp_path: Path) -> None:
    timer = Timer()
    for step in range(3):
        with traced(step, [1], tmp_path / "traces", rank=2), timer("policy_update"):
            torch.ones(4, 4) @ torch.ones(4, 4)
    (path,) = tmp_path.glob("traces/*")
    assert path.name == "step=000001-rank=00002.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert names.count("policy_update") == 1
    assert "aten::matmul" in names


def test_a_trace_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way")
    with traced(0, [0], tmp_path / "traces", rank=0):
        pass
    assert (tmp_path / "traces").read_text() == "in the way"
