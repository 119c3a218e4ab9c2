"""Run a configuration: check it, write its folder, run the flow and print the summary, or continue with its code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from rich.console import Console

from flows.change import note_edited_files, refuse_other
from flows.folder import OUTCOME_FILE, only_flow, write_config
from flows.origin import ORIGIN, Origin, own_source
from flows.preflight import check, take_wandb_variables
from flows.server import PrefectServer, mark_crashed_flows
from slurm.access import check_access, restrict
from slurm.backend import JobError, StoppedError, UnseenError, forget_stop, stop_asked
from slurm.environment import ROOT, job_environment, present_code
from slurm.failures import telling_logs
from slurm.trust import check_code
from specrl.artifacts import write_json
from specrl.config import Config, ConfigError
from specrl.events import EVENTS_FILE
from specrl.lifetime.segments import SEGMENTS_FILE
from specrl.lineage.record import CODE_DIR, RunRecord, code_of, read_record
from specrl.report.results import readable_config
from specrl.report.summary import SUMMARY_FILE, describe, headline, render_summary
from specrl.report.tables import lasting, print_line
from specrl.tracking.runs import Status, finish_parent_run, start_parent_run
from tasks.detached import IN_JOB, submit_flow
from tasks.run import begin

GUARD = "SPECRL_RUN_CODE"  # the variable with the digest of the code that replaced this process
OUTCOMES: dict[Status, str] = {"FINISHED": "finished", "KILLED": "stopped", "FAILED": "failed"}
ERRORS = Console(stderr=True, soft_wrap=True)
LOG_BYTES = 32 * 2**20  # the largest job log sent to MLflow; larger ones stay only in the run's folder


def execute(config: Config, *, origin: Origin | None = None, resumed: bool = False, detached: bool = False) -> None:
    """Run all stages of a configuration, with progress on standard error and the results on standard output.

    Unless `resumed`, the folder must hold no run, or one with this configuration and code. `detached` submits a job
    that does all of this.
    """
    restrict(config.cluster)
    for line in check_access(config.run_dir, config.cluster):
        print_line(line, ERRORS)
    check(config)
    if origin is not None:
        config = own_source(config)
    starting: AbstractContextManager[PrefectServer | None]
    starting = nullcontext() if detached else PrefectServer(config.runs_dir)
    with only_flow(config.run_dir, config.cluster), starting as server:
        if IN_JOB not in os.environ:  # otherwise the flow began when its job was submitted
            forget_stop(config.run_dir)  # before anything slow, because `specrl stop` may be called from now on
        record = _open(config, origin, resumed=resumed)
        if server is None:
            job = submit_flow(config, record.code_dir(config.run_dir))
            print(f"{job.backend} job {job.job_id} is the flow of run {config.name}: specrl watch {config.name}")
            return
        print(f"run {config.name} in {config.run_dir}", file=sys.stderr)
        take_wandb_variables(config)
        # Prefect's server starts while MLflow is imported and creates its database, which takes seconds.
        start_parent_run(config, headline(config))
        try:
            server.wait()
            # Prefect reads its environment only at import; the server has set it by now.
            from flows.pipeline import pipeline

            mark_crashed_flows(config.run_dir)
            pipeline(str(config.run_dir))
        except UnseenError:  # the jobs continue, and so does the run in MLflow
            raise
        except (KeyboardInterrupt, StoppedError) as error:
            finish(config, "KILLED", error)
            raise
        except Exception as error:  # A signal that ends the flow is no failure: the jobs continue, and so does the run.
            finish(config, "KILLED" if stop_asked(config.run_dir) else "FAILED", error)
            raise
        finish(config, "FINISHED")
    render_summary(config.run_dir, Console(file=lasting(sys.stdout), soft_wrap=True))


def _open(config: Config, origin: Origin | None, *, resumed: bool) -> RunRecord:
    """Begin a run, or continue the one in the folder, which must be this one."""
    if resumed:
        note_edited_files(config, ERRORS)
    else:
        refuse_other(config.run_dir, config, origin.start if origin is not None else None)
    record = read_record(config.run_dir)
    if record is None:
        record = begin_run(config, origin)
    else:
        write_config(config)
    (config.run_dir / OUTCOME_FILE).unlink(missing_ok=True)
    return record


def finish(config: Config, status: Status, error: BaseException | None = None) -> None:
    """Report how the run ended, and end it in MLflow with results, logs, and the stages' events and segments."""
    from specrl.report.html import REPORT_FILE  # imports NumPy and Arrow, which the flow has loaded by now
    from specrl.report.samples import response_rows

    run_dir = config.run_dir
    with suppress(OSError) if error is not None else nullcontext():  # a full disk must not hide why the run ended
        write_json(run_dir / OUTCOME_FILE, {"state": OUTCOMES[status], "error": str(error or "")})
    files = {"": [path for name in (SUMMARY_FILE, REPORT_FILE) if (path := run_dir / name).is_file()]}
    for folder in sorted((run_dir / "jobs").glob("*/")):
        files[f"logs/{folder.name}"] = [log for log in telling_logs(folder) if log.stat().st_size <= LOG_BYTES]
    for name in (EVENTS_FILE, SEGMENTS_FILE):
        for path in sorted((run_dir / "stages").glob(f"*/{name}")):
            files.setdefault(f"stages/{path.parent.name}", []).append(path)
    finish_parent_run(config, status, describe(run_dir), files, response_rows(run_dir))


def begin_run(config: Config, origin: Origin | None) -> RunRecord:
    """Write the files of a new run, the record last."""
    if origin is not None:
        origin.link(config.run_dir)
    elif (config.run_dir / ORIGIN).exists():
        raise ConfigError(
            f"run {config.name} was interrupted while it began; start it again with the same specrl run CONFIG --from "
            "RUN[@STEP]"
        )
    write_config(config)
    return begin(config, origin.start if origin is not None else None)


def continue_with_own_code(run_dir: Path, arguments: Sequence[str]) -> None:
    """Replace this process by `specrl ARGUMENTS` with the run's own code, unless that is loaded or does not exist."""
    check_access(run_dir, readable_config(run_dir).cluster)
    code = code_of(run_dir)
    if code is None:
        return
    folder = run_dir / CODE_DIR / code
    if folder.resolve() == ROOT.resolve() or code == present_code():
        return
    check_code(folder, code)
    if os.environ.get(GUARD) == code:
        raise ConfigError(f"run {run_dir.name}: Python imports {ROOT} in place of {folder}; look at PYTHONPATH")
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "flows.cli", *arguments]
    os.execve(command[0], command, {**os.environ, **job_environment(folder), GUARD: code})


def resume_in_process(run_dir: Path) -> None:
    """Resume a run in a separate process, which reports a failure on standard error; then raise a JobError."""
    code = subprocess.run([sys.executable, "-m", "flows.cli", "resume", str(run_dir)], check=False).returncode
    if code:
        raise JobError(f"specrl resume {run_dir} failed with exit code {code}")
