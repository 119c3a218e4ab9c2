"""Options of sbatch, containers and GPUs bound to tasks, in a job of a real Slurm."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.backend import JobKey
from slurm.environment import snapshot_code
from slurm.submit import attach_or_submit
from slurm.watch import wait
from specrl.artifacts import Artifact, write_result
from specrl.config import Config
from specrl.context import StageContext

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("devcluster")]

APPTAINER = """#!/bin/bash
# Stands for apptainer, which Debian does not package: notes its arguments, and runs the command outside.
[ "$1" = exec ] || exit 2
echo "$@" >> "$0.calls"
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
"""


class Environment(Artifact):
    seconds: float = 0.0


def main(context: StageContext) -> None:
    """Write down what this rank was given."""
    names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "GLOO_SOCKET_IFNAME")
    (context.stage_dir / f"rank-{os.environ['RANK']}.json").write_text(
        json.dumps({name: os.environ.get(name, "") for name in names})
    )
    if os.environ["RANK"] == "0":
        write_result(context.stage_dir, Environment())


def test_a_job_has_the_options_the_container_and_the_gpus_that_were_asked_for(
    make_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apptainer = tmp_path / "apptainer"
    apptainer.write_text(APPTAINER)
    apptainer.chmod(apptainer.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    config = make_run("slurm", nodes=1, ranks_per_node=2, gpus_per_rank=1)
    cluster = {
        **config.cluster.model_dump(),
        "python": sys.executable,
        "container": {"kind": "apptainer", "image": "image.sif"},
        "sbatch": {"comment": "a word", "gpus-per-task": 1},
    }
    config = Config.model_validate({**config.model_dump(by_alias=True), "cluster": cluster})
    context = StageContext(config, "prepare", "prepare-0", config.run_dir / "stages" / "prepare-0", {}, "")
    job = attach_or_submit(context, "tests.slurm.test_sbatch_jobs:main", snapshot_code(context.run_dir))
    assert job is not None
    told = subprocess.run(["scontrol", "show", "job", job.job_id], capture_output=True, text=True, check=True).stdout
    assert "Comment=a word" in told
    assert "WCKey" not in told
    wait(job, context, lambda state, progress: None)
    ranks = [json.loads((context.stage_dir / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "0"]
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0", "1"}
    assert [rank["GLOO_SOCKET_IFNAME"] for rank in ranks] == ["lo", "lo"]
    assert Path(ranks[0]["TRITON_CACHE_DIR"]).is_dir()
    calls = Path(f"{apptainer}.calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0].startswith(f"exec --nv --bind {config.runs_dir}:{config.runs_dir},")
    assert JobKey(config, context.key).record_path.exists()


def test_a_folder_with_signs_of_slurm_and_of_shells_in_its_name_and_variables_of_the_user(
    make_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"SQUEUE_STATES": "SUSPENDED", "SLURM_TIME_FORMAT": "relative", "SQUEUE_USERS": "nobody"}
    for name, value in {**variables, "SBATCH_PARTITION": "debug", "SBATCH_TIMELIMIT": "no time"}.items():
        monkeypatch.setenv(name, value)
    made = make_run("slurm", nodes=1)
    config = made.model_copy(update={"runs_dir": tmp_path / "50%train of o'brien läufe"})
    context = StageContext(config, "prepare", "prepare-0", config.run_dir / "stages" / "prepare-0", {}, "")
    code = snapshot_code(context.run_dir)
    job = attach_or_submit(context, "tests.slurm.test_sbatch_jobs:main", code)
    again = attach_or_submit(context, "tests.slurm.test_sbatch_jobs:main", code)
    assert job is not None and (again is None or again.job_id == job.job_id)
    assert wait(job, context, lambda state, progress: None)
    assert job.log(0).is_file()
