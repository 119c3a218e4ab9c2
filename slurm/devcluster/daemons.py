"""Starting and stopping the daemons of the development cluster, without systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PROGRAMS = (
    *("munged", "mungekey", "mariadbd", "mariadb-install-db", "mariadb"),
    *("slurmdbd", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo", "sacct", "sacctmgr"),
)
APT_LINE = (
    "apt-get install --no-install-recommends slurm-wlm munge slurm-wlm-basic-plugins slurmdbd "
    "mariadb-server-core mariadb-client-core"
)


class DevClusterError(RuntimeError):
    """The development cluster cannot be brought up; the message is one line that says how to fix it."""


def find(program: str) -> str | None:
    """Path of a program; daemons lie in folders that are not on every user's PATH."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if find(program) is None]


def check_installed() -> None:
    """
    Raises:
        DevClusterError: programs are missing; names them and the line that installs them.
    """
    if missing := missing_programs():
        raise DevClusterError(f"Slurm is not installed here ({', '.join(missing)} missing); run: {APT_LINE}")


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Output of a short command.

    Raises:
        DevClusterError: it failed; with the last line it printed.
    """
    program = find(str(command[0])) or str(command[0])
    done = subprocess.run(
        [program, *map(str, command[1:])],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DevClusterError(f"{Path(program).name} failed: {last[0]}")
    return done.stdout


def pid_of(pid_file: Path, program: str) -> int | None:
    """Process id in the file, if that process lives and runs `program` (ids are used again)."""
    try:
        pid = int(pid_file.read_text())
        name = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    comm, state = name[name.index("(") + 1 : name.rindex(")")], name[name.rindex(")") + 2]
    return pid if comm == program[:15] and state != "Z" else None


def start(command: Sequence[str | Path], log: Path, env: dict[str, str] | None = None, hostname: bool = False) -> None:
    """Start a daemon in a session of its own, its output appended to `log`.

    With `hostname` it runs under the host name `localhost` in a UTS namespace of its own: Slurm's daemons listen on
    the address of the host's name, and must not listen on another than loopback.
    """
    words = [find(str(command[0])) or str(command[0]), *map(str, command[1:])]
    if hostname:
        words = ["unshare", "--uts", "sh", "-c", 'hostname localhost && exec "$@"', "sh", *words]
    with log.open("ab") as output:
        subprocess.Popen(
            words,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(pid_file: Path, program: str, seconds: float = 10.0) -> None:
    """End a daemon: SIGTERM, and SIGKILL if it is still there after `seconds`."""
    pid = pid_of(pid_file, program)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        if not wait_until(lambda: pid_of(pid_file, program) is None, seconds):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    pid_file.unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def listens(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((address, port)) == 0


def loopback_address() -> tuple[str, bool]:
    """Address for the daemons, and whether they need a host name of their own to listen on it.

    Raises:
        DevClusterError: the host's name is not a loopback address and it cannot be changed for the daemons.
    """
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if address.startswith("127."):
            return address, False
    trial = ["unshare", "--uts", "sh", "-c", "hostname localhost"]
    if shutil.which("unshare") and subprocess.run(trial, capture_output=True, check=False).returncode == 0:
        return "127.0.0.1", True
    raise DevClusterError(
        f"Slurm would listen beyond this machine: its host name is no loopback address; "
        f"add the line '127.0.0.1 {socket.gethostname()}' to /etc/hosts, or run as root"
    )
