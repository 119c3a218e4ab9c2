"""Slurm commands: the options of sbatch and srun for a stage's job, and the list of a user's jobs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from submitit.slurm.slurm import _make_sbatch_string

from slurm.backend import JobError, SilentSchedulerError, StageRequest
from slurm.supervisor import AGAIN_CODE, warning_seconds
from specrl.artifacts import digest, write_text
from specrl.config import ClusterConfig, Config, StageName
from specrl.config.sbatch import MEMORY_OPTIONS, OTHER_OPTIONS, names_gpus
from specrl.processes import node_folder, slurm_environment

AGAIN = ["code=$?", f'[ "$code" -ne {AGAIN_CODE} ] || scontrol requeue "$SLURM_JOB_ID"', 'exit "$code"']
"""The end of the job's script, which requeues the job for ranks in containers that lack Slurm's commands."""
SITE_OPTIONS = ("reservation", "wckey", "network")  # set by sites as SBATCH_NAME, besides those with a key
WITH_KEYS = ("partition", "account", "qos", "constraint")
OF_STEPS = ("SBATCH_CPU_BIND", "SBATCH_MEM_BIND")  # prefixes of the variables that Slurm sets in a job
LOGS = "/folder-of-the-logs"  # placeholder for that folder until the script is rendered
CONTAINER_PYTHON = "python3"
WORDLESS = "without a word"
COMMAND_SECONDS = 30  # for a Slurm command before Slurm counts as silent
PRESENT_SECONDS = 1.0  # the age up to which a list is current: no killed flow is back that soon


def sbatch_options(config: Config, stage: StageName, without: Sequence[str] = ()) -> dict[str, Any]:
    """The options of sbatch for a stage's job, excluding some nodes, except name, logs and signals."""
    resources, cluster = config.resources_of(stage), config.cluster_of(stage)
    gpus = resources.ranks_per_node * resources.gpus_per_rank
    memory = round(resources.memory_gib_per_rank * resources.ranks_per_node * 1024)
    chosen = any(names_gpus(name, value) for name, value in cluster.sbatch.items())
    asks_memory = cluster.request_memory and MEMORY_OPTIONS.isdisjoint(cluster.sbatch)
    options = {
        "partition": cluster.partition or _of_site("partition"),
        "account": cluster.account or _of_site("account"),
        "qos": cluster.qos or _of_site("qos"),
        "constraint": cluster.constraint or _of_site("constraint"),
        "nodes": resources.nodes,
        "ntasks-per-node": resources.ranks_per_node,
        "cpus-per-task": resources.cpus_per_rank,
        "mem": f"{memory}M" if asks_memory else None,
        "gpus-per-node": gpus if gpus and not chosen else None,
        "time": resources.minutes,
        "requeue": True,
        "dependency": None,  # its place among them
        **{name: _of_site(name) for name in SITE_OPTIONS},
        **cluster.sbatch,
    }
    # Should a stage ever have two jobs, the second waits for the first.
    given = str(options.get("dependency") or "")
    if "?" not in given:  # which joins alternatives and cannot be combined
        options["dependency"] = ",".join(dict.fromkeys(filter(None, ["singleton", *given.split(",")])))
    if without:
        options["exclude"] = ",".join([*filter(None, [str(options.get("exclude") or "")]), *without])
    return {name: value for name, value in options.items() if value is not None}


def foreign_options(config: Config) -> dict[str, str]:
    """The options of `cluster.sbatch` unknown to Slurm itself, by key; a plugin may define them."""
    given = {f"cluster.sbatch.{name}": name for name in config.cluster.sbatch}
    for stage, resources in config.stage_resources.items():
        given |= {f"stage_resources.{stage}.sbatch.{name}": name for name in resources.sbatch}
    return {key: name for key, name in given.items() if name not in OTHER_OPTIONS}


def unknown_options(config: Config) -> list[str]:
    """A line for each option of `cluster.sbatch` that neither Slurm nor, according to sbatch, a plugin knows."""
    foreign = foreign_options(config)
    try:
        said = ask("sbatch", "--help") if foreign else ""
    except SilentSchedulerError:
        said = ""
    return [
        f"{key}: sbatch has no option --{name}{_perhaps(name)}; sbatch --help lists those of this cluster"
        for key, name in foreign.items()
        if not re.search(rf"--{re.escape(name)}\b(?!-)", said)
    ]


def _perhaps(name: str) -> str:
    close = get_close_matches(name, OTHER_OPTIONS, 1)
    return f"; perhaps {close[0]}" if close else ""


def unused_variables() -> list[str]:
    """The variables that sbatch does not get because they would override the job's script."""
    used = {_variable(option) for option in (*WITH_KEYS, *SITE_OPTIONS)}
    found = {name for name in os.environ if name.startswith("SBATCH_") or name == "SLURM_CLUSTERS"}
    return sorted(name for name in found - used if not name.startswith(OF_STEPS))


def _of_site(option: str) -> str | None:
    return os.environ.get(_variable(option)) or None


def _variable(option: str) -> str:
    return f"SBATCH_{option.upper()}"


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Options as command-line arguments."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]


def srun_options(config: Config, stage: StageName) -> list[str]:
    """The options of srun, which starts the ranks of the job."""
    resources, cluster = config.resources_of(stage), config.cluster_of(stage)
    # Since Slurm 22.05 a step does not inherit --cpus-per-task; a rank that dies must end the others.
    options = [f"--cpus-per-task={resources.cpus_per_rank}", "--kill-on-bad-exit=1"]
    if cluster.container is not None and cluster.container.kind == "pyxis":
        options += [f"--container-image={cluster.container.image}", f"--container-mounts={_mounts(config, cluster)}"]
        options.append(f"--container-workdir={Path.cwd()}")
    return options


def python_command(config: Config, stage: StageName) -> list[str]:
    """The command that starts Python in a rank, in its container if there is one."""
    cluster = config.cluster_of(stage)
    python = cluster.python or (sys.executable if cluster.container is None else CONTAINER_PYTHON)
    if cluster.container is None or cluster.container.kind == "pyxis":
        return [python]
    gpus = ["--nv"] if config.resources_of(stage).gpus_per_rank else []
    places = ["--bind", _mounts(config, cluster), "--pwd", str(Path.cwd())]
    return ["apptainer", "exec", *gpus, *places, cluster.container.image, python]


def parameters(request: StageRequest, environment: dict[str, str], without: Sequence[str] = ()) -> dict[str, Any]:
    """The options of sbatch and srun by submitit's names, for a job that excludes some nodes."""
    config, stage = request.context.config, request.context.stage
    if request.key.cluster.container is not None:
        # A container sees the user's home, where pip may have installed packages for another Python.
        environment = {**environment, "PYTHONNOUSERSITE": "1"}
    # After `cluster.setup`, which may load modules that set the same variables.
    exports = [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]
    return {
        "job_name": request.key.job_name,
        "setup": [*request.key.cluster.setup, *exports],
        "teardown": AGAIN,
        "srun_args": srun_options(config, stage),
        "additional_parameters": sbatch_options(config, stage, without),
        "wckey": None,  # submitit's default is its own name, which clusters that check such keys refuse
        "signal_delay_s": warning_seconds(request.resources),
        "stderr_to_stdout": True,
    }


def batch_script(request: StageRequest, environment: dict[str, str], without: Sequence[str] = ()) -> str:
    """The script of a job, as submitit renders it."""
    words = [*python_command(request.context.config, request.context.stage), *request.arguments]
    text = _make_sbatch_string(shlex.join(words), LOGS, **parameters(request, environment, without))
    # In log names % begins a Slurm pattern, and %% is a literal %; submitit replaces %t there too.
    folder = str(request.key.folder).replace("%", "%%")
    for name in ("%j_0_log.out", "%j_%t_log.out"):
        text = text.replace(f"{LOGS}/{name}", shlex.quote(f"{folder}/{name}"))
    return text


def describe(config: Config, stage: StageName) -> str:
    """How a stage's job would be submitted and its ranks started, as two commands in one line."""
    flags = as_flags(sbatch_options(config, stage))
    ranks = ["srun", *srun_options(config, stage), *python_command(config, stage)]
    return f"{shlex.join(['sbatch', *flags])}; {shlex.join(ranks)}"


def _mounts(config: Config, cluster: ClusterConfig) -> str:
    assert cluster.container is not None
    own = dict.fromkeys(f"{folder}:{folder}" for folder in (config.runs_dir.absolute(), Path.cwd()))
    secrets = [f"{cluster.environment_file}:{cluster.environment_file}"] if cluster.environment_file else []
    return ",".join([*own, *secrets, *cluster.container.mounts])


@dataclass(frozen=True)
class Listed:
    """A job of the user that is in the queue or has just ended."""

    job_id: str
    word: str  # Slurm's word for its state
    reason: str  # why it waits
    name: str


def listed(max_age: float) -> list[Listed]:
    """The user's jobs, as listed by squeue at most `max_age` seconds ago for any flow on this host."""
    try:
        path = _shared_list()
        with FileLock(path.with_suffix(".lock"), timeout=2 * COMMAND_SECONDS):
            text = _read(path, max_age)
            if text is None:
                text = _queue()
                write_text(path, text)
    except Timeout as error:
        raise SilentSchedulerError("another flow on this host waits for squeue") from error
    except OSError:  # such as a full /tmp: then nothing is shared
        text = _queue()
    rows = [line.strip().split("|", 3) for line in text.splitlines()]
    return [Listed(*row) for row in rows if len(row) == 4]


def _queue() -> str:
    return ask("squeue", "-h", "--me", "-t", "all", "-o", "%i|%T|%r|%j")


def forget() -> None:
    """Invalidate the shared list, because a job is being submitted."""
    with contextlib.suppress(OSError):  # nothing is shared
        _shared_list().unlink(missing_ok=True)


def _shared_list() -> Path:
    cluster = digest([shutil.which("squeue"), os.environ.get("SLURM_CONF")])
    return node_folder() / f"squeue-{cluster}"


def _read(path: Path, max_age: float) -> str | None:
    try:
        age = time.time() - path.stat().st_mtime
        return path.read_text() if 0 <= age <= max_age else None  # a clock that was set back puts it in the future
    except FileNotFoundError:
        return None


def ask(*command: str, seconds: float = COMMAND_SECONDS, environment: Mapping[str, str] | None = None) -> str:
    """The output of a Slurm command, by default in a neutral environment; a SilentSchedulerError if it fails."""
    variables = slurm_environment() if environment is None else environment
    try:
        # Job names and sites' additions may be in any encoding.
        done = subprocess.run(
            command, env=variables, capture_output=True, errors="replace", timeout=seconds, check=False
        )
    except FileNotFoundError as error:
        if command[0] == "sacct":
            raise SilentSchedulerError("no sacct") from error
        raise JobError(f"{command[0]} is not installed: --cluster slurm works where Slurm's commands are") from error
    except subprocess.TimeoutExpired as error:
        raise SilentSchedulerError(f"{command[0]} took more than {seconds:g} s") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        # sbatch --test-only says "allocation failure: ...", besides errors of plugins.
        errors = [line for line in lines if "error:" in line or "failure:" in line] or lines[-1:]
        said = "; ".join(line.removeprefix(f"{command[0]}: error: ").strip() for line in errors)
        if not said:
            raise SilentSchedulerError(f"{command[0]} ended with exit code {done.returncode}, {WORDLESS}")
        raise SilentSchedulerError(f"{command[0]}: {said}")
    return done.stdout + (done.stderr if "--test-only" in command else "")  # where sbatch prints its answer
