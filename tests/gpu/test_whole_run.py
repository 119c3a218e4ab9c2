"""The whole pipeline of a tiny model on GPUs that engine and trainer share: CUDA graphs, sleep, native FP8 and NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.pipeline_runs import SMOKE, finish, specrl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

MODEL = ["dtype=bfloat16", "tiny.family=qwen3", "tiny.hidden_size=256", "tiny.num_heads=2", "tiny.num_kv_heads=2"]
SETTINGS = [
    *(f"model.{setting}" for setting in MODEL),
    *("engine.compile=true", "engine.sleep=true", "engine.gpu_memory_fraction=0.2"),
    *("speculation.method=eagle3+replay", "bubbles.use=pregenerate"),
    *("resources.gpus_per_rank=1", "resources.memory_gib_per_rank=16", "train.checkpoint_every=2"),
]


@pytest.mark.parametrize(("engines", "parallel"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_stage_ends_well_and_no_draft_changes_a_token(
    precision: str, engines: int, parallel: int, tmp_path: Path
) -> None:
    """On two GPUs with an engine each, or with one engine, and one copy of the policy, that they divide."""
    ranks = engines * parallel
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPU here: nothing to exchange")
    gib = torch.cuda.mem_get_info()[1] / 2**30
    settings = [*SETTINGS, f"runs_dir={tmp_path}", f"resources.gpu_memory_gib={gib}"]
    settings += [f"{part}.ranks_per_node={ranks}" for part in ("resources", "stage_resources.train")]
    settings += [f"{part}.tensor_parallel={parallel}" for part in ("engine", "policy")]
    settings += [f"precision.{part}={precision}" for part in ("generation", "training", "kv_cache")]
    finish(specrl("run", str(SMOKE), *(word for setting in settings for word in ("--set", setting))), seconds=900)
    summary = json.loads((tmp_path / "smoke" / "summary.json").read_text())
    exactness = summary["validation"]["exactness"]
    assert exactness["num_accepted_tokens"] > 0
    assert exactness["sampled"]["num_unexplained"] == exactness["greedy"]["num_unexplained"] == 0
    assert summary["refit"]["failures"] == 0 and summary["train"]["steps"] == 3
    modes = {summary["precision"][f"{engine}_mode"] for engine in ("generation", "training")}
    assert modes == {"native" if precision == "fp8" else "off"}
