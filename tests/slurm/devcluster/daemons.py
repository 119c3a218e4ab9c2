"""Start and stop the daemons of the development cluster, without systemd."""

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
    "munged",
    "mungekey",
    "mariadbd",
    "mariadb-install-db",
    "mariadb",
    "slurmdbd",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "squeue",
    "scancel",
    "sinfo",
    "sacct",
    "sacctmgr",
)
APT_LINE = (
    "apt-get install --no-install-recommends slurm-wlm munge slurm-wlm-basic-plugins slurmdbd "
    "mariadb-server-core mariadb-client-core"
)


class DevClusterError(RuntimeError):
    """The development cluster cannot be started. The message is one line that says how to fix it."""


def find(program: str) -> str | None:
    """Return the path of a program, also from the folders of daemons, which are not on every user's PATH."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def missing_programs() -> list[str]:
    """Return the programs that the cluster needs and that are not installed."""
    return [program for program in PROGRAMS if find(program) is None]


def check_installed() -> None:
    """Check that all programs are installed.

    Raises:
        DevClusterError: Programs are missing; the message names them and the line that installs them.
    """
    if missing := missing_programs():
        raise DevClusterError(f"Slurm is not installed here ({', '.join(missing)} missing); run: {APT_LINE}")


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Return the output of a short command.

    Raises:
        DevClusterError: The command failed; the message has the last line that it printed.
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
    """Return the process id in the file if that process is alive and runs `program` (ids repeat), or None."""
    try:
        pid = int(pid_file.read_text())
        name = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    comm, state = name[name.index("(") + 1 : name.rindex(")")], name[name.rindex(")") + 2]
    return pid if comm == program[:15] and state != "Z" else None


def start(command: Sequence[str | Path], log: Path, env: dict[str, str] | None = None, hostname: bool = False) -> None:
    """Start a daemon in a session of its own, and append its output to `log`.

    With `hostname` it runs under the host name `localhost` in a UTS namespace of its own: Slurm's daemons listen on
    the address of the host's name, and must listen on loopback only.
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
    """End a daemon with SIGTERM, and with SIGKILL if it is still alive after `seconds`."""
    pid = pid_of(pid_file, program)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        if not wait_until(lambda: pid_of(pid_file, program) is None, seconds):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    pid_file.unlink(missing_ok=True)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, for at most `seconds`, and return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def listens(address: str, port: int) -> bool:
    """Return whether a process accepts connections at this address and port."""
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((address, port)) == 0


def loopback_address() -> tuple[str, bool]:
    """Return the address for the daemons, and whether they need a host name of their own to listen on it.

    Raises:
        DevClusterError: The host's name is not a loopback address, and it cannot be changed for the daemons.
    """
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if address.startswith("127."):
            return address, False
    trial = ["unshare", "--uts", "sh", "-c", "hostname localhost"]
    if shutil.which("unshare") and subprocess.run(trial, capture_output=True, check=False).returncode == 0:
        return "127.0.0.1", True
    raise DevClusterError(
        f"Slurm would be reachable from other machines: this host's name is not a loopback address; "
        f"add the line '127.0.0.1 {socket.gethostname()}' to /etc/hosts, or run as root"
    )
