"""The whole pipeline of a tiny model, on a GPU that engine and trainer share: CUDA graphs, sleep and native FP8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.pipeline_runs import SMOKE, finish, specrl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

MODEL = ["dtype=bfloat16", "tiny.family=qwen3", "tiny.hidden_size=256", "tiny.num_heads=2", "tiny.num_kv_heads=1"]
SETTINGS = [
    *(f"model.{setting}" for setting in MODEL),
    *("engine.compile=true", "engine.sleep=true", "engine.gpu_memory_fraction=0.2"),
    *("speculation.method=eagle3+replay", "bubbles.use=pregenerate", "stage_resources.train.ranks_per_node=1"),
    *("resources.gpus_per_rank=1", "resources.memory_gib_per_rank=16", "train.checkpoint_every=2"),
]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_stage_ends_well_and_no_draft_changes_a_token(precision: str, tmp_path: Path) -> None:
    gib = torch.cuda.mem_get_info()[1] / 2**30
    settings = [*SETTINGS, f"runs_dir={tmp_path}", f"resources.gpu_memory_gib={gib}"]
    settings += [f"precision.{part}={precision}" for part in ("generation", "training", "kv_cache")]
    finish(specrl("run", str(SMOKE), *(word for setting in settings for word in ("--set", setting))), seconds=900)
    summary = json.loads((tmp_path / "smoke" / "summary.json").read_text())
    exactness = summary["validation"]["exactness"]
    assert exactness["num_accepted_tokens"] > 0
    assert exactness["sampled"]["num_unexplained"] == exactness["greedy"]["num_unexplained"] == 0
    assert summary["refit"]["failures"] == 0 and summary["train"]["steps"] == 3
    modes = {summary["precision"][f"{engine}_mode"] for engine in ("generation", "training")}
    assert modes == {"native" if precision == "fp8" else "off"}
