"""Functions for processes, ports and locks of the operating system."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import getpass
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import IO

LOOPBACK = "127.0.0.1"
PORTS = range(15_000, 32_000)
"""The ports to choose from. Linux gives those from 32,768 on to outgoing connections, one of which could take a port
after it was found free and before somebody listens on it."""
PR_SET_PDEATHSIG = 1
"""The `prctl` option that sets the signal sent to a process when its parent ends (Linux, `sys/prctl.h`)."""
HELPER = (
    "import sys; from importlib import import_module; from multiprocessing.connection import Connection; "
    "rank = Connection(int(sys.argv[2])); sys.path[:] = rank.recv(); import_module(sys.argv[1]).main(rank)"
)
"""The program of a helper, `python -c HELPER MODULE FD`: it searches for modules where the rank does."""
SLURMS = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_")
"""The prefixes of variables that control the behaviour and output of Slurm's commands."""
OF_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")  # select the Slurm cluster and authenticate the user
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables of a job's rank, which a job started from it must not inherit."""
TAIL_BYTES = 4096  # the number of bytes read from the end of a log to find its last line
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
OF_IPV6 = re.compile(r":.*:.*/|\]")
"""Matches an IPv6 network, such as fe80::/10, and an address with a port, such as [::1]:80, without its `[`."""
OTHERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that Slurm or a terminal sends to all processes of a job, but that are meant for the rank."""


def start_helper(
    module: str,
    environment: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
    *,
    send: Sequence[object] = (),
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that runs the `main` function of a module; return it and this end of a connection to it.

    `main` gets the other end. It first receives this process's id: passed to `become_helper` or `end_with_parent`,
    it makes the helper end with the thread that started it. The values of `send` follow. The helper imports only what
    `module` imports. Its output goes to `output`, by default that of this process. Without an `environment` it
    inherits this process's, with one OpenMP thread unless OMP_NUM_THREADS is set.
    """
    connection, remote = Pipe()
    with remote:
        process = subprocess.Popen(
            [sys.executable, "-c", HELPER, module, str(remote.fileno())],
            env={"OMP_NUM_THREADS": "1", **os.environ} if environment is None else environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[remote.fileno()],
            start_new_session=True,  # so Ctrl-C does not reach it, and `end_helper` ends its children too
        )
    with contextlib.suppress(OSError):  # it has already ended; its first user will notice
        for value in (sys.path, os.getpid(), *send):
            connection.send(value)
    return process, connection


def end_helper(process: subprocess.Popen[bytes]) -> None:
    """End a helper and its children; one that has already ended is reaped."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def become_helper(parent: int) -> None:
    """Make this process end with the rank (a process id) that started it, and leave group signals to that rank."""
    end_with_parent(parent)
    for number in OTHERS_SIGNALS:
        signal.signal(number, lambda *_: None)  # a handler and not SIG_IGN, which programs started here would inherit
    with contextlib.suppress(OSError):  # if memory runs out, this process is killed before the rank
        Path("/proc/self/oom_score_adj").write_text("1000")


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends for any reason; SystemExit if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before this call: no signal would ever come
        raise SystemExit(f"process {parent}, which started this one, has ended")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, or None when it has ended.

    Process ids repeat; an id and a start time together name one process for good.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection within the block, and freeze all objects that exist at its end.

    Large packages create very many permanent objects: collecting garbage among them takes a good part of the import
    time, and again each time vLLM collects garbage while an engine starts.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back an interrupt (Ctrl-C) that arrives within the block, and raise it at the end of the block.

    This affects only the main thread, since no other thread is ever interrupted. The signal is not blocked, because
    processes started in the block would inherit that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock file, on this host or on another one that shares the file system.

    The file is opened read-only: the run may belong to another user, who may have put a link there, or lie on a
    read-only file system.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            return False
        raise
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def slurm_environment() -> dict[str, str]:
    """The environment for Slurm's commands: nothing in it filters or changes their output; times are Unix times."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SLURMS) or name in OF_CLUSTER}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}


def reach_loopback() -> None:
    """Let this process and its children reach servers on this machine directly, whatever proxy is set for others.

    Settings with which httpx cannot start are removed: a SOCKS proxy without its package, an unreadable certificate
    file, and networks and ports in NO_PROXY that no Python client understands.
    """
    if importlib.util.find_spec("socksio") is None:
        for name in [name for name in os.environ if name.lower() in PROXIES]:
            if os.environ[name].startswith("socks"):
                del os.environ[name]
    if not os.access(os.environ.get("SSL_CERT_FILE", ""), os.R_OK):
        os.environ.pop("SSL_CERT_FILE", None)
    given = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    for name, own in zip(("no_proxy", "NO_PROXY"), given, strict=True):
        hosts = [host.strip().removeprefix("[").removesuffix("]") for host in (own or "".join(given)).split(",")]
        hosts = [host for host in hosts if host and not OF_IPV6.search(host)]
        if "*" not in hosts:  # which counts only on its own
            os.environ[name] = ",".join(dict.fromkeys([*hosts, LOOPBACK, "localhost", "::1"]))


def output_of(*command: str, seconds: float, environment: Mapping[str, str] | None = None) -> str | None:
    """A command's output, stripped; None if there is no such command, or it fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def end_of(log: Path, size: int) -> str:
    """The last bytes of a log as text; empty if it does not exist or cannot be read."""
    data = b""
    with contextlib.suppress(OSError):
        if log.is_file():
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - size))
                data = file.read()
    return data.decode(errors="replace")


def last_line(log: Path, without: str = "(?!)") -> str:
    """The last line of a log that does not begin with the pattern `without`, at most 600 characters of it."""
    lines = (line.strip() for line in reversed(end_of(log, TAIL_BYTES).split("\n")))
    return next((line for line in lines if line and not re.match(without, line)), "it said nothing")[:600]


def name_user() -> None:
    """Give a user without a name on this machine, as in containers, one for libraries that insist on it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"


def allow_warnings() -> None:
    """Keep PYTHONWARNINGS=error from turning libraries' warnings into errors, here and in child processes.

    Its other settings remain.
    """
    given = os.environ.get("PYTHONWARNINGS", "").split(",")
    kept = [rule for rule in given if not _makes_errors(rule)]
    if kept != given:
        os.environ["PYTHONWARNINGS"] = ",".join(kept)
        # Processes of multiprocessing inherit these options too.
        sys.warnoptions[:] = [rule for rule in sys.warnoptions if not _makes_errors(rule)]
        warnings.filters = [rule for rule in warnings.filters if rule[0] != "error"]


def _makes_errors(rule: str) -> bool:
    action = rule.partition(":")[0].strip()
    return action != "" and "error".startswith(action)  # Python accepts abbreviations


def node_folder() -> Path:
    """A folder of this node or job to which no other user can write."""
    if job := os.environ.get("SLURM_TMPDIR"):
        with contextlib.suppress(OSError):  # a shell may still have the variables of a job that has ended
            (Path(job) / "specrl").mkdir(parents=True, exist_ok=True)
            return Path(job) / "specrl"
    folder = Path(tempfile.gettempdir()) / f"specrl-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        return _folder_of_process()  # another user made it, or may write to it
    return folder


@functools.cache
def _folder_of_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="specrl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def port_of(job: str) -> int:
    """A TCP port for the ranks of a job, which each of them computes; it may be in use."""
    return random.Random(job).choice(PORTS)


def free_port(address: str = LOOPBACK) -> int:
    """A TCP port on which nothing currently listens."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
