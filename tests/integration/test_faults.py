"""Silent failures that others report are injected into a training, and each must be noticed and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specrl.artifacts import RESULT_FILE, write_json
from specrl.config import StageName, parse_config
from specrl.context import StageContext
from specrl.report.results import find_stages
from specrl.schemas import Rollout, rollout_path, write_rollouts
from tests.exactness.toy import likely_tokens
from tests.integration.faults import CONTROL, FAULTS, HEALTHY_STEPS, Fault
from tests.integration.finished_run import write_finished_run
from tests.integration.pipeline_runs import ROOT

pytestmark = pytest.mark.engine
WORDS = {
    "two of the policy's tensors exchanged": "the engine's policy differs from the trainer's in model.layers.0",
    "drafter zeroed as after a sleep": "drafter collapse",
}
"""What is said of some of them."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = write_finished_run(tmp_path_factory.mktemp("faults") / "runs")
    tokens = likely_tokens() * 3
    stored = [Rollout(0, 0, 0, i, 0, 0, 0, [5, 6, 7], tokens, [0.0] * len(tokens), "", "", "stop") for i in range(4)]
    write_rollouts(rollout_path(run_dir / "rollouts", 0, 0), stored)  # what the probes after a refit are made from
    return run_dir


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_silent_failure_is_noticed(fault: Fault, run_dir: Path, tmp_path: Path) -> None:
    found = inject(fault, run_dir, tmp_path)
    reported, where, steps = fault.reported or "-", found["where"], found["after_steps"]
    print(f"\n| {fault.name} | {reported} | {where} | {steps} | {found['message']} |")
    assert found["noticed"] == (fault.name != CONTROL), found
    assert WORDS.get(fault.name, "") in found["message"]


def inject(fault: Fault, run_dir: Path, folder: Path) -> dict[str, Any]:
    """What was said of the fault, in a process of its own."""
    stages = find_stages(run_dir)
    before: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate")
    inputs = {stage: stages[stage] for stage in before}
    if fault.damage_drafter is not None:
        values = json.loads((inputs["pretrain"] / RESULT_FILE).read_text())
        shutil.copytree(values["drafter_dir"], folder / "drafter")
        fault.damage_drafter(folder / "drafter")
        inputs["pretrain"] = folder / "pretrain"
        write_json(inputs["pretrain"] / RESULT_FILE, values | {"drafter_dir": str(folder / "drafter")})
    data = json.loads((run_dir / "config.json").read_text())
    data |= {"name": folder.name, "runs_dir": str(folder.parent)}
    steps = HEALTHY_STEPS + 1
    data["train"] |= {"num_steps": steps, "checkpoint_every": steps, "prompts_per_step": 8, "samples_per_prompt": 4}
    data["data"]["reward"] = "tests.integration.loop_plan:reward"  # half of the responses have it: something is learned
    context = StageContext(parse_config(data), "train", "train-faults", folder / "stage", inputs, "")
    context.save(folder / "context.json")
    command = [sys.executable, "-m", "tests.integration.faults", str(folder / "context.json"), fault.name]
    process = subprocess.run(
        [*command, str(folder / "finding.json")], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "finding.json").read_text())
    return found
