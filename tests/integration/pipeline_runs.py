"""Runs of the smoke configuration through the command line, as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch
from safetensors.torch import load_file

from tests.forks import outside_of_engines

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "configs" / "smoke.toml"
COLUMNS = ["step", "prompt_id", "sample", "seed", "response_tokens", "reward", "advantage"]


def specrl(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=ROOT,
        env={**outside_of_engines(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 1200) -> str:
    """What it printed; it must end well."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output


def run_smoke(runs_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    runs_dir.mkdir(parents=True, exist_ok=True)
    chats = runs_dir / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"{number} + 1"}) + "\n" for number in range(3)))
    settings = [
        f"runs_dir={runs_dir}",
        f"drafter.data={chats}",
        "drafter.data_prompts=4",
        "resources.cpus_per_rank=1",  # other tests want the other core
    ]
    return specrl("run", str(SMOKE), *[word for setting in settings for word in ("--set", setting)], *arguments)


def wait_for(run_dir: Path, pattern: str, seconds: float = 600) -> Path:
    """The first file below the run's folder that matches, once it is there."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := sorted(run_dir.glob(pattern)):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {run_dir} after {seconds} s")


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def rollouts(run_dir: Path, *more: str) -> list[dict[str, Any]]:
    """Everything sampled and how it was judged, in a fixed order; of times and draft counters only what is named."""
    table = pyarrow.dataset.dataset(run_dir / "rollouts", format="ipc").to_table(columns=[*COLUMNS, *more])
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Policy and drafter as exported."""
    tensors: dict[str, torch.Tensor] = {}
    for part in ("policy", "drafter"):
        loaded = load_file(run_dir / "export" / part / "model.safetensors")
        tensors |= {f"{part}.{name}": tensor for name, tensor in loaded.items()}
    return tensors


def assert_same_result(left: Path, right: Path) -> None:
    """Token for token and bit for bit: FP32 is exact."""
    assert rollouts(left) == rollouts(right)
    expected, found = final_weights(left), final_weights(right)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
