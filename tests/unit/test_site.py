"""What sites and users put into the environment of Slurm's commands, with programs in place of these commands."""

from __future__ import annotations

import errno
import getpass
import http.server
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.cli import invoke
from flows.folder import only_flow, write_config
from flows.server import PrefectServer
from slurm import commands, slurm_backend, submit
from slurm.backend import JobError, JobKey, Record, SilentSchedulerError, State, StoppedError
from slurm.failures import explain, is_of_connection, write_error
from slurm.local import LocalJob
from slurm.slurm_backend import SlurmBackend, SlurmJob
from slurm.submit import attach_or_submit
from specrl.artifacts import MOST_BYTES
from specrl.config import Config, ConfigError, parse_config
from specrl.context import StageContext
from specrl.events import read_events
from specrl.lifetime.segments import Reason, add_to_segment, begin_segment
from specrl.processes import PORTS, node_folder, port_of, reach_loopback, start_helper
from specrl.report.results import read_config
from specrl.tracking.store import RUN_ID_FILE
from tasks.run import begin

TIMEOUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
LIMIT = "sbatch: error: QOSMaxSubmitJobPerUserLimit\\nsbatch: error: Batch job submission failed: Job violates policy"
VARIABLES = ("SQUEUE_STATES", "SQUEUE_PARTITION", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SACCT_FORMAT", "SCANCEL_STATE")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_backend, "PRESENT_SECONDS", 0)  # a list of jobs is never old
    program(folder, "srun", "exit 0")
    program(folder, "squeue", f"env >> {folder}/seen; [ ! -e {folder}/queue ] || cat {folder}/queue")
    program(folder, "sbatch", f'cp "$1" {folder}/script; env > {folder}/given; echo Submitted batch job 4711')
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def configured(tmp_path: Path, runs: str = "runs", **cluster: Any) -> Config:
    return parse_config(
        {"name": "x", "runs_dir": str(tmp_path / runs), "model": {"source": "tiny"}}
        | {"cluster": {"backend": "slurm", **cluster}}
    )


def context_of(config: Config) -> StageContext:
    return StageContext(config, "prepare", "prepare-abc123", config.run_dir / "stages" / "p", {}, "")


def submitted(config: Config, programs: Path) -> list[str]:
    """The options in the script with which Slurm is asked to run a stage."""
    assert attach_or_submit(context_of(config), "m:f", Path("/code")) is not None
    lines = (programs / "script").read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_variables_of_the_user_change_nothing_that_slurm_is_asked(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "RUNNING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    program(programs, "squeue", f'env > {programs}/seen; date -d @1900000000 "+RUNNING $SLURM_TIME_FORMAT"')
    assert SlurmBackend().place(None).end_at == 1900000000  # type: ignore[arg-type]
    seen = (programs / "seen").read_text().splitlines()
    assert "SLURM_CONF=/etc/slurm.conf" in seen
    assert not any(line.startswith(VARIABLES) for line in seen)


def test_an_hour_that_comes_twice_is_read_as_the_one_that_is_meant(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = 1792888200  # 2026-10-25 02:30 in summer time; an hour later it is 02:30 again
    for end in (first, first + 3600):
        program(programs, "squeue", f'date -d @{end} "+RUNNING $SLURM_TIME_FORMAT"')
        assert SlurmBackend().place(None).end_at == end  # type: ignore[arg-type]


def test_options_that_sites_teach_as_variables_reach_the_job_and_the_configuration_wins(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "MEM_PER_CPU", "TIMELIMIT", "JOB_NAME"):
        monkeypatch.setenv(f"SBATCH_{name}", f"site-{name.lower()}")
    options = submitted(configured(tmp_path, partition="own", sbatch={"reservation": "night"}), programs)
    assert {"--account=site-account", "--partition=own", "--qos=site-qos", "--reservation=night"} <= set(options)
    assert not any("site-mem" in option or "site-time" in option or "site-job" in option for option in options)
    assert "SBATCH_" not in (programs / "given").read_text()  # they would win over the script


@pytest.mark.parametrize(("option", "value"), [("mem-per-cpu", "4G"), ("mem_per_gpu", "60G")])
def test_memory_by_cores_or_gpus_replaces_that_of_the_node(
    option: str, value: str, programs: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, sbatch={option: value})
    name = option.replace("_", "-")
    assert [line for line in submitted(config, programs) if line.startswith("--mem")] == [f"--{name}={value}"]
    job = SlurmJob("7", tmp_path, attached=False)
    program(programs, "squeue", "echo OUT_OF_MEMORY None")
    config.run_dir.mkdir(exist_ok=True, parents=True)
    assert f"cluster.sbatch.{name} = {value}; raise it" in explain(job, context_of(config), job.state())


def test_a_job_whose_rank_the_kernel_ended_for_memory_says_so_although_slurm_calls_it_failed(
    programs: Path, tmp_path: Path
) -> None:
    context = context_of(configured(tmp_path))
    job = SlurmJob("7", JobKey(context.config, context.key).folder, attached=False)
    job.folder.mkdir(parents=True)
    program(programs, "squeue", "echo FAILED NonZeroExitCode")
    for log, reason in (
        ("srun: error: n1: task 1: Out Of Memory\n", "out of memory"),
        ("slurmstepd-n1: error: Detected 1 oom_kill event in StepId=7.0.\n", "out of memory"),
        ("slurmstepd: error: Detected 2 oom-kill event(s) in step 7.0 cgroup.\n", "out of memory"),
        ("reward: no room for kills\nsrun: error: n1: task 1: Exited with exit code 1\n", None),
    ):
        job.log(0).write_text(log)
        state = job.state()
        assert state.reason == reason
        told = "killed, most likely out of memory: resources.memory_gib_per_rank = 10; raise it; log: "
        assert (told in explain(job, context, state)) == (reason is not None)
    with job.log(0).open("r+") as log:  # larger than what is read of other files
        log.seek(2 * MOST_BYTES)
        log.write("\nsrun: error: n1: task 1: Out Of Memory\n")
    state = job.state()
    write_error(job.folder, 0, RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert state.reason == "out of memory" and told in explain(job, context, state)
    write_error(job.folder, 0, ValueError("the cause"))
    assert "ValueError: the cause (rank 0)" in explain(job, context, state)


def test_a_local_job_that_memory_ran_out_for_is_not_told_to_ask_for_more(tmp_path: Path) -> None:
    job = LocalJob(Record("local", "7", None, ""), tmp_path, attached=False)
    context = context_of(configured(tmp_path, backend="local"))
    said = explain(job, context, State("ended", "rank 0 was killed by SIGKILL", True, "out of memory"))
    assert "out of memory: this machine has no more; lower engine.kv_cache_gib, " in said


def test_what_sbatch_is_told_by_variables_and_does_not_get_is_said_once(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text('name = "x"\n[model]\nsource = "tiny"\n[drafter]\ndraft_vocab_size = 64\n')
    for name in ("SBATCH_PARTITION", "SBATCH_GRES", "SBATCH_MEM_BIND_TYPE", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME"):
        monkeypatch.setenv(name, "gpu")
    for cluster, lines in (("slurm", ["SBATCH_GRES, SLURM_CLUSTERS: sbatch does not get them; "]), ("local", [])):
        words = ["run", str(path), "--dry-run", "--cluster", cluster, "--set", f"runs_dir={tmp_path}/runs"]
        assert invoke(words) == 0
        warned = capsys.readouterr().err.splitlines()
        assert [line.removeprefix("warning: ").partition("cluster.sbatch")[0] for line in warned] == lines


def test_a_variable_that_says_nothing_is_no_option(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCOUNT", "PARTITION", "RESERVATION"):
        monkeypatch.setenv(f"SBATCH_{name}", "")
    named = ("--account", "--partition", "--reservation")
    assert [option for option in submitted(configured(tmp_path), programs) if option.startswith(named)] == []


def test_a_folder_that_takes_no_more_or_has_gone_with_its_job_keeps_nobody_from_slurm(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "squeue", 'echo "7|RUNNING|None|x"')
    monkeypatch.setattr("slurm.commands.write_text", full)
    assert [job.job_id for job in commands.listed(60)] == ["7"]
    monkeypatch.setenv("SLURM_TMPDIR", "/proc/no-such-job")  # of a job whose shell is still there
    assert [job.job_id for job in commands.listed(60)] == ["7"]
    monkeypatch.delenv("SLURM_TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"specrl-{os.getuid()}").touch()  # as anybody may in /tmp
    assert node_folder().is_dir()
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no-such-folder")
    commands.forget()
    assert [job.job_id for job in commands.listed(60)] == ["7"]


def full(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("folder", ["exp_50%noise", "100%_done", "%j%t%%", "my runs", "läufe", "o'brien", "a=0"])
def test_logs_lie_where_they_are_looked_for_whatever_the_folder_is_called(
    folder: str, programs: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, folder)
    (output,) = [line for line in submitted(config, programs) if line.startswith("--output=")]
    (pattern,) = shlex.split(output.removeprefix("--output="))
    log = SlurmJob("4711", JobKey(config, "prepare-abc123").folder, attached=False).log(0)
    assert pattern.replace("%%", "\0").replace("%j", "4711").replace("\0", "%") == str(log)


def test_words_for_states_that_nobody_knows_are_asked_about_again(programs: Path, tmp_path: Path) -> None:
    job = SlurmJob("7", tmp_path, attached=False)
    for word, phase in {"RESV_DEL_HOLD": "pending", "DEADLINE": "ended", "COMPLETED": "ended"}.items():
        program(programs, "squeue", f"echo {word} None")
        assert job.state().phase == phase
    program(programs, "squeue", "echo ENTANGLED None")
    with pytest.raises(SilentSchedulerError, match="ENTANGLED is no state"):
        job.state()


@pytest.mark.parametrize("rule", ["error", "e", "err::UserWarning", "default, error:3"])
def test_warnings_that_a_user_has_made_errors_end_neither_a_command_nor_what_it_starts(rule: str) -> None:
    text = (
        "import subprocess, sys; from flows.cli import invoke; invoke(['--version'])\n"
        "warn = 'import warnings; warnings.warn(str(3))'; exec(warn)\n"
        "subprocess.run([sys.executable, '-c', warn], check=True)"
    )
    environment = {**os.environ, "PYTHONWARNINGS": rule}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning: 3") == 2  # they are shown


@pytest.mark.parametrize("rule", ["", "error::DeprecationWarning"])
def test_warnings_that_a_user_ignores_stay_ignored(rule: str) -> None:
    ignored = "ignore::UserWarning,ignore::RuntimeWarning:pkg.errors"
    text = (
        "import os, warnings; from specrl.processes import allow_warnings; allow_warnings()\n"
        "warnings.warn('unseen'); print(os.environ['PYTHONWARNINGS'])"
    )
    environment = {**os.environ, "PYTHONWARNINGS": ",".join(filter(None, [rule, ignored]))}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{ignored}\n", "")


def test_a_helper_has_one_thread_of_openmp_or_the_environment_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\ndef main(starter):\n    starter.send(os.environ.get('OMP_NUM_THREADS'))\n    starter.recv()\n"
    (tmp_path / "threads_here.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for environment, threads in ((None, "1"), (os.environ, None)):  # the second is that of a schedule's flows
        process, connection = start_helper("threads_here", environment)
        assert connection.recv() == threads
        process.wait()


def test_a_user_whom_the_machine_has_no_name_for_can_use_slurm() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    text = (
        "import getpass, os\n"
        "from slurm.backend import JobKey; from slurm.slurm_backend import SlurmBackend\n"
        "from specrl.config import Config; from specrl.processes import name_user\n"
        "os.setuid(54321); SlurmBackend().find(JobKey(Config(name='x', runs_dir='/tmp/none'), 'train-abc'))\n"
        "name_user(); print(getpass.getuser())"
    )
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        Path(folder).chmod(0o755)
        program(Path(folder), "squeue", "exit 0")
        environment["PATH"] = f"{folder}:/usr/bin:/bin"
        command = [sys.executable, "-c", text]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("uid54321\n", 0), done.stderr


def test_a_name_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    assert getpass.getuser() == "ada"


def test_an_unanswered_submission_is_looked_up_before_it_is_made_again(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "UNCERTAIN_SECONDS", 0.1)
    fails = f'echo x >> {programs}/calls; echo "{TIMEOUT}" >&2'
    row = f"4711|PENDING|Priority|{JobKey(configured(tmp_path), 'prepare-abc123').job_name}"
    # It was queued all the same.
    program(programs, "sbatch", f"{fails}; echo '{row}' > {programs}/queue; exit 1")
    job = attach_or_submit(context_of(configured(tmp_path)), "m:f", Path("/code"))
    assert job is not None and (job.job_id, job.attached) == ("4711", True)
    assert (programs / "calls").read_text() == "x\n"
    (programs / "queue").unlink()
    again = f"if [ $(wc -l < {programs}/calls) -lt 3 ]; then exit 1; fi; echo Submitted batch job 12"
    program(programs, "sbatch", f"{fails}; {again}")
    job = attach_or_submit(context_of(configured(tmp_path)), "m:f", Path("/code"))
    assert job is not None and (job.job_id, job.attached) == ("12", False)
    monkeypatch.setattr(submit, "SILENCE_SECONDS", 0.2)
    program(programs, "sbatch", f"{fails}; exit 1")
    with pytest.raises(JobError, match=r"prepare could not be submitted for .* minutes: .*Socket timed out"):
        attach_or_submit(context_of(configured(tmp_path)), "m:f", Path("/code"))


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("This job 64 cores wide is billed\\nSubmitted batch job 12\\n", "12"),
        ("Submitted batch job 12 on cluster c1\\n", "12"),
        ("123;c1\\n", "123"),
        ("  Submitted batch job 12 \\n", "12"),
        ("Submitted batch job 12.\\n", "12"),
        ("64\\nSubmitted batch job 12 (account x)\\n", "12"),
        ("sbatch: Submitted batch job 12\\n", "12"),
        ("3 jobs are yours\\n 123 \\n", "123"),
        ("Hinweis f\\374r alle\\nSubmitted batch job 12\\n", "12"),  # Latin-1
    ],
)
def test_a_job_is_known_by_its_number_whatever_a_site_prints_beside_it(
    printed: str, job_id: str, programs: Path, tmp_path: Path
) -> None:
    program(programs, "sbatch", f"printf '{printed}'")
    job = attach_or_submit(context_of(configured(tmp_path)), "m:f", Path("/code"))
    assert job is not None and job.job_id == job_id


@pytest.mark.parametrize(
    ("said", "repeated"),
    [
        ("Invalid account or account/partition combination specified", "; --account not given; --partition=gpu"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "; --time=60"),
        ("Memory specification can not be satisfied", "; --mem=10240M"),
        ("You are no member of this project", ""),
    ],
)
def test_a_refusal_repeats_the_settings_that_it_is_about(
    said: str, repeated: str, programs: Path, tmp_path: Path
) -> None:
    program(programs, "sbatch", f'echo "sbatch: error: {said}" >&2; exit 1')
    with pytest.raises(JobError, match=re.escape(f"{said}{repeated}") + "$"):
        attach_or_submit(context_of(configured(tmp_path, partition="gpu")), "m:f", Path("/code"))


@pytest.mark.parametrize(
    ("cluster", "repeated"),
    [
        ({"sbatch": {"mem-per-cpu": "4G"}}, "; --mem-per-cpu=4G"),
        ({"sbatch": {"mem-per-gpu": "40G"}}, "; --mem-per-gpu=40G"),
        ({"request_memory": False}, ""),
    ],
)
def test_a_refusal_for_memory_repeats_the_option_that_was_sent(
    cluster: dict[str, Any], repeated: str, programs: Path, tmp_path: Path
) -> None:
    said = "Memory specification can not be satisfied"
    program(programs, "sbatch", f'echo "sbatch: error: {said}" >&2; exit 1')
    with pytest.raises(JobError, match=f"{said}{repeated}$"):
        attach_or_submit(context_of(configured(tmp_path, **cluster)), "m:f", Path("/code"))


@pytest.mark.parametrize(
    "fails",
    [
        'echo "sbatch: error: Batch job submission failed: Message receive failure" >&2; exit 1',
        'echo "sbatch: error: Batch job submission failed: Unable to connect to database" >&2; exit 1',
        'echo "sbatch: error: Batch job submission failed: Unexpected message received" >&2; exit 1',
        'echo "sbatch: error: Batch job submission failed: Protocol authentication error" >&2; exit 1',
        'echo "sbatch: error: Batch job submission failed: I/O error writing script/environment to file" >&2; exit 1',
        "kill -9 $$",
    ],
)
def test_a_submission_that_may_have_arrived_is_looked_up(
    fails: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "UNCERTAIN_SECONDS", 0.1)
    row = f"4711|PENDING|Priority|{JobKey(configured(tmp_path), 'prepare-abc123').job_name}"
    program(programs, "sbatch", f"echo '{row}' > {programs}/queue; {fails}")
    job = attach_or_submit(context_of(configured(tmp_path)), "m:f", Path("/code"))
    assert job is not None and (job.job_id, job.attached) == ("4711", True)


def test_a_full_queue_is_waited_for_until_the_run_is_stopped(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "FULL_SECONDS", 0.1)
    monkeypatch.setattr(submit, "SILENCE_SECONDS", 0)
    config = configured(tmp_path)
    full = f'if [ -e {programs}/room ]; then echo Submitted batch job 5; else printf "{LIMIT}" >&2; exit 1; fi'
    program(programs, "sbatch", full)
    later = threading.Timer(0.5, (programs / "room").touch)
    later.start()
    job = attach_or_submit(context_of(config), "m:f", Path("/code"))
    assert job is not None and job.job_id == "5"
    (programs / "room").unlink()
    threading.Timer(0.5, (config.run_dir / "stop").touch).start()
    with pytest.raises(StoppedError):
        attach_or_submit(context_of(config), "m:f", Path("/code"))
    program(programs, "sbatch", 'echo "sbatch: error: invalid account or partition specified" >&2; exit 1')
    with pytest.raises(
        JobError, match=r"Slurm refuses the job: invalid account .*; --account not given; --partition not"
    ):
        attach_or_submit(context_of(config), "m:f", Path("/code"))
    program(programs, "sbatch", 'echo "sbatch: error: Requested node configuration is not available" >&2; exit 1')
    with pytest.raises(JobError, match=r"is not available; .*--cpus-per-task=2; --nodes=1$"):
        attach_or_submit(context_of(config), "m:f", Path("/code"))
    program(programs, "sbatch", 'echo "sbatch: error: Invalid node name specified" >&2; exit 1')
    with pytest.raises(JobError, match=r"refuses the job: Invalid node name specified; --nodelist=n7$"):
        attach_or_submit(context_of(configured(tmp_path, sbatch={"nodelist": "n7"})), "m:f", Path("/code"))


def test_a_job_whose_ranks_never_start_is_not_explained_by_the_job_before(programs: Path, tmp_path: Path) -> None:
    context = context_of(configured(tmp_path))
    folder = JobKey(context.config, context.key).folder
    folder.mkdir(parents=True)
    write_error(folder, 0, ValueError("of the job before"))
    job = attach_or_submit(context, "m:f", Path("/code"))
    assert job is not None
    job.log(0).write_text("module: command not found\n")
    said = explain(job, context, State("ended", "FAILED", failed=True))
    assert "no Python error; the log of rank 0 ends: module: command not found; log: " in said


def test_a_silence_after_a_long_wait_in_a_full_queue_counts_from_its_own_beginning(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(submit, "time", clock)
    calls = programs / "calls"
    full = f'if [ $(wc -l < {calls}) -le 12 ]; then printf "{LIMIT}" >&2; exit 1; fi'  # for a minute each
    silent = f'if [ $(wc -l < {calls}) = 13 ]; then echo "{TIMEOUT}" >&2; exit 1; fi'
    program(programs, "sbatch", f"echo x >> {calls}; {full}; {silent}; echo Submitted batch job 5")
    job = attach_or_submit(context_of(configured(tmp_path)), "m:f", Path("/code"))
    assert job is not None and job.job_id == "5"
    assert now[0] > submit.SILENCE_SECONDS


def test_one_squeue_is_for_all_jobs_of_a_user_and_all_flows_on_a_host(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_backend, "PRESENT_SECONDS", 10)
    rows = "".join(f"{number}|RUNNING|None|train-{number}\\n" for number in range(20))
    program(programs, "squeue", f'echo x >> {programs}/calls; printf "{rows}"')
    jobs = [SlurmJob(str(number), tmp_path, attached=True, ask_seconds=60) for number in range(20)]
    assert [job.state().phase for job in jobs] == ["running"] * 20
    text = (
        "from pathlib import Path; from slurm.slurm_backend import SlurmJob\n"
        "print(SlurmJob('7', Path('x'), attached=True).state().phase)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "running\n"
    assert (programs / "calls").read_text() == "x\n"
    jobs[0].state()  # who asks again soon wants to know it soon
    assert (programs / "calls").read_text() == "x\nx\n"
    commands.forget()
    commands.listed(60)
    assert (programs / "calls").read_text() == "x\nx\nx\n"


def test_a_list_of_the_future_is_none_since_the_clock_was_set_back(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "squeue", 'echo "7|RUNNING|None|x"')
    commands.listed(60)
    program(programs, "squeue", 'echo "8|RUNNING|None|x"')
    now = time.time()
    monkeypatch.setattr("slurm.commands.time.time", lambda: now - 3600)
    assert [job.job_id for job in commands.listed(60)] == ["8"]


def ended(stage_dir: Path, reason: Reason, log: str = "", ended_ago: float = 60, **more: str) -> None:
    """A segment of job 4710 that has ended, whose log has these words."""
    number = begin_segment(stage_dir, "4710", "gpu1").number
    add_to_segment(stage_dir, number, reason=reason, ended=time.time() - ended_ago, **more)
    jobs = stage_dir.parents[1] / "jobs" / stage_dir.name
    jobs.mkdir(parents=True, exist_ok=True)
    (jobs / "4710_0_log.out").write_text(log)


@pytest.mark.parametrize(
    ("segment", "nodes"),
    [
        ({"reason": "node lost", "log": "step 3\nsrun: error: Node failure on gpu7\n"}, "gpu7"),
        ({"reason": "node lost"}, "gpu1"),  # with srun
        ({"reason": "hang", "failed_node": "gpu3"}, "gpu3"),
        ({"reason": "node lost", "ended_ago": 25 * 3600}, None),
        ({"reason": "walltime"}, None),
    ],
    ids=["another", "first", "hang", "long-ago", "walltime"],
)
def test_a_node_that_has_failed_is_left_out_for_a_day(
    segment: dict[str, Any], nodes: str | None, programs: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, sbatch={"exclude": "gpu9"})
    ended(config.run_dir / "stages" / "pretrain-0", **segment)
    (option,) = [line for line in submitted(config, programs) if line.startswith("--exclude=")]
    assert option == f"--exclude=gpu9,{nodes}" if nodes else option == "--exclude=gpu9"
    events = read_events(config.run_dir / "stages" / "p")
    assert [(event.kind, event.text.split()[0]) for event in events] == ([("node", nodes)] if nodes else [])


@pytest.mark.parametrize("beside", ["", "sbatch: error: a plugin is missing"], ids=["alone", "beside"])
def test_where_too_few_nodes_are_left_none_is_left_out(beside: str, programs: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    ended(config.run_dir / "stages" / "p", "node lost")
    # What is refused must have been a question: accounting has a line for each job that is refused.
    text = f"{beside}\nallocation failure: Requested node configuration is not available"
    refuse = f'if [ "$1" = --test-only ]; then echo "$@" > {programs}/asked; echo "{text}" >&2; exit 1; fi'
    program(programs, "sbatch", f'{refuse}; cp "$1" {programs}/script; echo Submitted batch job 4711')
    assert not any("exclude" in line for line in submitted(config, programs))
    assert "--exclude=gpu1" in (programs / "asked").read_text()
    assert read_events(config.run_dir / "stages" / "p") == []


def test_ports_of_jobs_are_none_that_the_kernel_gives_away_and_change_with_every_start() -> None:
    ports = [port_of(f"4711-{attempt}") for attempt in range(20)]
    assert set(ports) <= set(PORTS) and len(set(ports)) == 20
    assert not is_of_connection(ValueError("x"))


@pytest.fixture
def healthy() -> Iterator[str]:
    """The address of a server on this machine that answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/health"
    server.shutdown()


PROXIES: list[dict[str, str]] = [
    {"http_proxy": "http://127.0.0.1:9"},
    {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"},
    {"http_proxy": "http://127.0.0.1:9", "no_proxy": "localhost,.cluster.example"},
    {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.0/8"},
    {"http_proxy": "http://127.0.0.1:9", "no_proxy": "*"},
    {"ALL_PROXY": "socks5://127.0.0.1:9", "http_proxy": "socks5h://127.0.0.1:9"},
    {"http_proxy": "http://127.0.0.1:9", "SSL_CERT_FILE": "/of/another/machine.pem"},
]


@pytest.mark.parametrize("host", ["fe80::/10", "::1/128", "fd07:b51a:cc66:f0::/64", "[::1]", "[fe80::1]:80"])
def test_a_host_without_a_proxy_that_httpx_cannot_read_stops_nothing(
    host: str, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, f"{host},.cluster.example")
    reach_loopback()
    assert httpx.get(healthy).status_code == 200
    assert os.environ["no_proxy"].removeprefix("::1,").startswith(".cluster.example,")


@pytest.mark.parametrize("proxies", PROXIES, ids=str)
def test_servers_on_this_machine_are_reached_without_a_proxy(
    proxies: dict[str, str], healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    import requests

    for name, value in {"no_proxy": "", "NO_PROXY": "", **proxies}.items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    reach_loopback()
    assert urllib.request.urlopen(healthy, timeout=5).status == 200
    assert httpx.get(healthy).status_code == 200
    assert requests.get(healthy, timeout=5).status_code == 200
    kept = os.environ.get("no_proxy", "")
    assert all(host in kept for host in proxies.get("no_proxy", proxies.get("NO_PROXY", "")).split(","))


def test_prefect_starts_behind_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with PrefectServer(tmp_path) as server:
        server.wait()
    monkeypatch.delenv("PREFECT_HOME", raising=False)


def test_variables_and_the_home_folder_stand_for_their_values_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = parse_config(
        {
            "name": "x",
            "runs_dir": "$SCRATCH/runs",
            "model": {"source": "~/models/own"},
            "data": {
                "source": "file",
                "path": "${SCRATCH}/a.jsonl",
                "validation_path": "~/b.jsonl",
                "reward": "exact_match",
            },
            "drafter": {"data": "$SCRATCH/chats.jsonl"},
            "validate": {"sets": {"hard": {"path": "$SCRATCH/hard.jsonl", "reward": "exact_match"}}},
            "cluster": {
                "environment_file": "~/secrets",
                "python": "~/venv/bin/python",
                "container": {"kind": "pyxis", "image": "$SCRATCH/x.sqsh", "mounts": ["$SCRATCH:/data"]},
            },
        }
    )
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    assert config.runs_dir == scratch / "runs" and config.model.source == str(home / "models/own")
    assert str(scratch / "a.jsonl") in str(config.data.path) and str(home / "b.jsonl") in str(
        config.data.validation_path
    )
    assert str(scratch / "chats.jsonl") in str(config.drafter.data)
    assert str(scratch / "hard.jsonl") in str(config.validate_.sets["hard"].path)
    assert config.cluster.environment_file == home / "secrets"
    container = config.cluster.container
    assert container is not None and container.image == str(scratch / "x.sqsh") and config.cluster.python is not None
    assert container.mounts == (f"{scratch}:/data",) and config.cluster.python == str(home / "venv/bin/python")
    with pytest.raises(ConfigError, match=r"runs_dir.*the variable \$NO_SUCH is not set"):
        parse_config({"name": "x", "runs_dir": "$NO_SUCH/runs"})


def test_a_run_that_is_moved_or_seen_under_another_path_finds_its_job(programs: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    begin(config)
    name = JobKey(config, "train-abc").job_name
    config.runs_dir.rename(tmp_path / "moved")
    assert JobKey(configured(tmp_path, "moved"), "train-abc").job_name == name
    begin(config)  # another run in the same place
    assert JobKey(config, "train-abc").job_name != name


def test_a_copy_of_a_run_is_a_run_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path)
    begin(config)
    write_config(config)
    (config.run_dir / RUN_ID_FILE).write_text("0123\n")
    tracking = config.run_dir / "tracking"
    tracking.mkdir()
    for name in ("log.jsonl", "sent-mlflow.json"):
        (tracking / name).touch()
    name, copy = JobKey(config, "train-abc").job_name, configured(tmp_path, "copies")
    shutil.copytree(config.run_dir, copy.run_dir)
    shutil.copytree(config.run_dir, tmp_path / "links/x", copy_function=os.link)
    for other in (copy, configured(tmp_path, "links")):  # what ends the jobs of a copy leaves those of the run alone
        assert JobKey(other, "train-abc").job_name != name
    with only_flow(copy.run_dir, copy.cluster):
        assert "is a copy: a run of its own from now on" in capsys.readouterr().err
    own = JobKey(copy, "train-abc").job_name
    shutil.rmtree(config.run_dir)
    with only_flow(copy.run_dir, copy.cluster):
        assert capsys.readouterr().err == ""
    assert JobKey(copy, "train-abc").job_name == own != name
    assert not (copy.run_dir / RUN_ID_FILE).exists() and read_config(copy.run_dir) == copy
    assert [path.name for path in (copy.run_dir / "tracking").iterdir()] == ["log.jsonl"]  # all is sent once more
