"""Weights & Biases: one run per log, in the group of the pipeline's run, with configuration and metrics.

A separate process sends the log from disk, because the library changes how its process exits and waits there for
unreachable servers. It ends when its connection to the stage does, so a killed job leaves nothing behind.

W&B's step is an entry's position in the log, so that a resumed run tells which entries it lacks; charts use `step`. An
offline file cannot be appended to, so it is written in one go when the job ends.
"""

from __future__ import annotations

import logging
import netrc
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from specrl.artifacts import read_file, read_object, write_text
from specrl.config import Config, ConfigError
from specrl.processes import OTHERS_SIGNALS, is_locked, last_line, start_helper
from specrl.tracking.log import Entry, Log, Sent

logger = logging.getLogger(__name__)

TRACKER = FOLDER = "wandb"
ID_FILE, OUTPUT_FILE, LOCK_FILE = "wandb_id", "wandb.txt", ".wandb.lock"
"""In the log's folder: the id of the W&B run, and the messages of the last sending process."""
LOOK_SECONDS, RETRY_SECONDS = 1.0, 60.0
"""Seconds between checks for new entries, and between attempts at an unreachable server."""
START_SECONDS, FINISH_SECONDS, PATIENCE_SECONDS = 20.0, 40.0, 60.0
"""How long W&B may take to accept a run and its waiting entries, and how long the end of a stage or a flow waits."""
ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false"}  # no telemetry
CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
SUMMARY_FILE = "summary.json"


class WandbSending:
    """Sends a log until `close`, or nothing if `tracking.wandb` is off. Never raises."""

    def __init__(self, config: Config, log: Log) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        if config.tracking.wandb == "off":
            return
        folder = config.run_dir / FOLDER
        settings = {
            "mode": config.tracking.wandb,
            "project": project_of(config),
            "run_group": config.name,
            "run_job_type": "run" if log.owner == config.run_dir else log.owner.name.rpartition("-")[0],
        }
        try:
            for path in (folder, log.folder, log.folder / FOLDER):  # the run may be somebody else's
                if path.is_symlink():
                    raise OSError(f"{path} is a link")
            log.folder.mkdir(parents=True, exist_ok=True)
            output_file = log.folder / OUTPUT_FILE
            output_file.unlink(missing_ok=True)
            environment = {**ENVIRONMENT, "WANDB_CACHE_DIR": str(log.folder / FOLDER), **os.environ}
            order = log.owner, folder, config.settings, settings
            with output_file.open("x") as output:
                self._process, self._connection = start_helper(__name__, environment, output, send=[order])
        except OSError as error:
            logger.warning("nothing of what %s logs is sent to W&B: %s", log.owner.name, error)

    def close(self, patience_s: float = PATIENCE_SECONDS) -> str | None:
        """Send what waits and end; return why something remains unsent, if so."""
        if self._process is None:
            return None
        self._connection.close()
        try:
            status = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return f"W&B has not taken it within {patience_s:g} s"  # it still may; the process then ends by itself
        return f"{last_line(self._log.folder / OUTPUT_FILE)} (status {status})" if status else None


def send_to_wandb(config: Config, folders: Sequence[Path]) -> list[str]:
    """Send the logs of these folders; return a line for each that still has unsent entries."""
    late = [Log(folder) for folder in folders if not Sent(Log(folder), TRACKER).is_complete()]
    sending = [(log, None if is_locked(log.folder / LOCK_FILE) else WandbSending(config, log)) for log in late]
    found = [(log.owner.name, process.close() if process else "its job is sending it") for log, process in sending]
    return [f"W&B lacks what {name} logged: {reason}" for name, reason in found if reason is not None]


def project_of(config: Config) -> str:
    return config.tracking.experiment.rpartition("/")[2]


def check_wandb(config: Config, variables: Mapping[str, str]) -> None:
    """Raise a `ConfigError` if W&B is requested but missing, or has no key in these variables or in this process."""
    mode, known = config.tracking.wandb, {**os.environ, **variables}
    if mode != "off" and find_spec("wandb") is None:
        raise ConfigError(f'tracking.wandb = "{mode}": there is no package wandb here: make env, or pip install wandb')
    project = project_of(config)
    if mode != "off" and (len(project) > 128 or not set(project).isdisjoint("\\#?%:")):
        raise ConfigError(
            f"tracking.experiment = {config.tracking.experiment!r}: W&B takes projects of at most 128 characters, "
            "without \\ # ? % and :"
        )
    host = urlsplit(known.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    if mode == "online" and not any(known.get(name) for name in CREDENTIALS) and not _netrc_has(host):
        raise ConfigError(
            f'tracking.wandb = "online": there is no key for {host}: wandb login, or export WANDB_API_KEY; or set '
            '"offline", and send the files with wandb beta sync'
        )


def _netrc_has(host: str) -> bool:
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def main(stage: Connection) -> None:
    """Send the log that the stage names until the connection ends, which `poll` reveals; nothing else arrives on it."""
    for number in OTHERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # before W&B starts its own process
    stage.recv()  # the stage's process, which this one outlives until all is sent
    owner, files, config, settings = stage.recv()
    log = Log(owner)
    with FileLock(log.folder / LOCK_FILE, timeout=PATIENCE_SECONDS):  # an earlier job's sender may be about to end
        if settings["mode"] == "offline":
            stage.poll(None)
        if not stage.poll(0) or not Sent(log, TRACKER).is_complete():
            send(log, start_run(log, config, settings, stage), stage, files)
        shutil.rmtree(log.folder / FOLDER, ignore_errors=True)


def send(log: Log, run: Any, stage: Connection, files: Path) -> None:
    """Send what the run lacks until the stage ends, and record arrivals; offline, write a file into `files`."""
    sent = Sent(log, TRACKER)
    run.define_metric("*", step_metric="step")
    entry: Entry | None = None
    position, status, is_last = sent.now.position, "FINISHED", False
    while not is_last:
        is_last = stage.poll(LOOK_SECONDS)  # entries logged so far are on disk
        for entry in log.entries(position):
            position, status = entry.end, entry.values.get("status", status)
            if entry.begin >= run.starting_step:
                log_entry(run, log, entry)
    log.flush()
    run.finish(exit_code=int(status != "FINISHED"))
    if run.settings.mode == "offline":
        files.mkdir(parents=True, exist_ok=True)
        Path(run.settings.sync_dir).rename(files / Path(run.settings.sync_dir).name)
    if entry is not None:
        sent.note([entry])


def start_run(log: Log, config: dict[str, Any], chosen: dict[str, Any], stage: Connection) -> Any:
    """Start or resume the W&B run of a log; wait for an unreachable server."""
    import wandb
    from wandb.errors import AuthenticationError, CommError

    shutil.rmtree(log.folder / FOLDER, ignore_errors=True)  # left by a killed process
    settings = wandb.Settings(
        **chosen,
        root_dir=str(log.folder),
        run_id=_id_of(log),
        run_name=log.owner.name,
        resume="allow" if chosen["mode"] == "online" else None,
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_save_requirements=False,
        x_disable_stats=True,
        init_timeout=START_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
    )
    while True:
        try:
            return wandb.init(settings=settings, config=config)
        except CommError as error:
            if isinstance(error, AuthenticationError) or stage.poll(RETRY_SECONDS):
                raise


def _id_of(log: Log) -> str:
    path = log.folder / ID_FILE
    if not path.exists():
        write_text(path, secrets.token_hex(8))
    return read_file(path).decode()


def log_entry(run: Any, log: Log, entry: Entry) -> None:
    """Send the part of an entry that W&B shows."""
    values = entry.values
    if entry.kind == "metrics":
        run.log({"step": values["step"], "_timestamp": entry.time_ms / 1000, **values["metrics"]}, step=entry.begin)
    elif entry.kind == "params":
        run.config.update(values["params"], allow_val_change=True)
    elif entry.kind == "artifact" and Path(values["path"]).name == SUMMARY_FILE:
        run.summary.update(read_object(log.owner / SUMMARY_FILE))
