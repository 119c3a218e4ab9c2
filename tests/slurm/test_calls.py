"""How many packages a reader enters who follows the calls of `specrl run` to the function of a stage in a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.calls import read_calls, recording
from tests.slurm.conftest import ROOT

MOST = 18
SPECRL_WITH_DUMMY_STAGES = """
import sys
from flows.cli import invoke
from tasks.run import run_stage
run_stage.__kwdefaults__["entry"] = "tests.slurm.dummy_stage:main"
sys.exit(invoke(sys.argv[1:]))
"""


def test_the_calls_from_the_command_line_to_a_stage_enter_few_packages(tmp_path: Path) -> None:
    words = ["run", "configs/smoke.toml", "--set", f"runs_dir={json.dumps(str(tmp_path / 'runs'))}"]
    environment = {**os.environ, **recording(tmp_path), "DUMMY_PREPARE": "fail"}
    command = [sys.executable, "-c", SPECRL_WITH_DUMMY_STAGES, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "the stage went wrong" in done.stderr
    calls = read_calls(tmp_path)
    [stage] = [call for call in calls if call.function == "tests.slurm.dummy_stage:main"]
    before = [call for call in calls[: calls.index(stage)] if call.package != "tests"]
    packages = {call.package for call in before}
    assert {"flows", "flows.commands", "tasks", "slurm", "specrl", "specrl.config"} <= packages
    assert len({call.process for call in before}) >= 3  # the flow, the controller and the rank
    assert len(packages) <= MOST, sorted(packages)
