"""Weights & Biases: a run for each log, in the group of the pipeline's run, with its configuration and metrics.

A process of its own sends the log, from disk as all trackers do: the library changes how its process ends, and waits
there for servers that are away. It ends once its connection to the stage does, so that nothing is left of a job that
was killed.

The step of W&B is the position of an entry in the log, so that a run that is resumed says from where on it lacks
something; charts are drawn over `step`. A file of offline mode cannot be appended to: it is written when the job ends,
and at once.
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
"""In the folder of the log: the id of the W&B run, and what the last process that sent it said."""
LOOK_SECONDS, RETRY_SECONDS = 1.0, 60.0
"""How often new entries are looked for, and a server that is away is tried again."""
START_SECONDS, FINISH_SECONDS, PATIENCE_SECONDS = 20.0, 40.0, 60.0
"""For how long W&B may take to take a run and what waits of it, and how long the end of a stage or a flow waits."""
ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false"}  # no telemetry
CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
SUMMARY_FILE = "summary.json"


class WandbSending:
    """Sends a log from now on until `close`; nothing where `tracking.wandb` is off. It never raises."""

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
        """Send what waits and end; return why that was not everything."""
        if self._process is None:
            return None
        self._connection.close()
        try:
            status = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return f"W&B has not taken it within {patience_s:g} s"  # it may yet, and the process then ends by itself
        return f"{last_line(self._log.folder / OUTPUT_FILE)} (status {status})" if status else None


def send_to_wandb(config: Config, folders: Sequence[Path]) -> list[str]:
    """Send what these folders have logged; return a line for each of which something still waits."""
    late = [Log(folder) for folder in folders if not Sent(Log(folder), TRACKER).is_complete()]
    sending = [(log, None if is_locked(log.folder / LOCK_FILE) else WandbSending(config, log)) for log in late]
    found = [(log.owner.name, process.close() if process else "its job is sending it") for log, process in sending]
    return [f"W&B lacks what {name} logged: {reason}" for name, reason in found if reason is not None]


def project_of(config: Config) -> str:
    return config.tracking.experiment.rpartition("/")[2]


def check_wandb(config: Config, variables: Mapping[str, str]) -> None:
    """Raise a `ConfigError` where W&B is asked for and missing, or has no key in these variables or in this process."""
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
    """Send the log that the stage names until the connection to it ends, as `poll` tells: nothing else comes of it."""
    for number in OTHERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # before W&B starts a process of its own
    stage.recv()  # the stage's process, whose end this one survives until all is sent
    owner, files, config, settings = stage.recv()
    log = Log(owner)
    with FileLock(log.folder / LOCK_FILE, timeout=PATIENCE_SECONDS):  # that of a job before may be about to end
        if settings["mode"] == "offline":
            stage.poll(None)
        if not stage.poll(0) or not Sent(log, TRACKER).is_complete():
            send(log, start_run(log, config, settings, stage), stage, files)
        shutil.rmtree(log.folder / FOLDER, ignore_errors=True)


def send(log: Log, run: Any, stage: Connection, files: Path) -> None:
    """Send what the run lacks until the stage ends, and note that it arrived; offline, a file is put into `files`."""
    sent = Sent(log, TRACKER)
    run.define_metric("*", step_metric="step")
    entry: Entry | None = None
    position, status, is_last = sent.now.position, "FINISHED", False
    while not is_last:
        is_last = stage.poll(LOOK_SECONDS)  # what was logged before is on disk
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
    """Begin the W&B run of a log, or resume it; wait for a server that is away."""
    import wandb
    from wandb.errors import AuthenticationError, CommError

    shutil.rmtree(log.folder / FOLDER, ignore_errors=True)  # of a process that was killed
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
    """Send what W&B shows of an entry."""
    values = entry.values
    if entry.kind == "metrics":
        run.log({"step": values["step"], "_timestamp": entry.time_ms / 1000, **values["metrics"]}, step=entry.begin)
    elif entry.kind == "params":
        run.config.update(values["params"], allow_val_change=True)
    elif entry.kind == "artifact" and Path(values["path"]).name == SUMMARY_FILE:
        run.summary.update(read_object(log.owner / SUMMARY_FILE))
