"""Confines a reward to its scratch folder by calling the kernel directly; no package is needed.

Namespaces (user, processes, mounts, network) confine the scoring process; Landlock and a seccomp filter confine its
fork for each response. A kernel may lack any of these or refuse them to users: `available` says which work here.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import platform
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from errno import EAGAIN, ENOSYS, EPERM
from pathlib import Path

import psutil

MEMORY = 4 * 2**30  # bytes of address space for scoring one response, in addition to the reward's import
FILE_SIZE = 256 * 2**20  # bytes of the largest file, and of a scratch folder with its own file system
FILES = 10_000  # in a scratch folder with its own file system
PROCESSES = 200  # that a user's reward may start per response
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"  # may hold others' data
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", *DEVICES)
"""What a model's program may read besides Python and its own folder."""
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Variables without which Python or text might behave differently than in the rank."""

_libc = ctypes.CDLL(None, use_errno=True)
_X86 = platform.machine() == "x86_64"
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # values of `seccomp_data.arch` (linux/audit.h)
_DENIED: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
}
"""The numbers of the system calls that are always denied, on x86-64 and aarch64 (Linux, `unistd.h`)."""
_NUMBERS = _DENIED | {
    "socket": (41, 198),
    "clone": (56, 220),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "seccomp": (317, 277),
    "capset": (126, 91),
    "pidfd_send_signal": (424, 424),
    "clone3": (435, 435),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
"""The numbers of the system calls that are made here or filtered."""
_CHANGES_OF_MODE = (
    (90, 91, 268, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199, 132, 235, 261, 280, 452),
    (52, 53, 54, 55, 5, 6, 7, 14, 15, 16, 88, 452),
)
"""chmod, chown, setxattr, removexattr and utime in all forms, which read-only mounts refuse but Landlock allows."""
_FORKS = (57, 58) if _X86 else ()  # fork and vfork, which aarch64 lacks


@dataclass(frozen=True)
class Confinement:
    """The means by which the kernel confines a reward."""

    namespaces: bool  # of users, processes, mounts, IPC, and network unless `data.reward_network` allows it
    read_only: bool  # all mounts except the scratch folder
    landlock: int  # ABI version; 0 without Landlock
    filters: bool  # seccomp filter

    def gaps(self, network: bool) -> str:
        """What is not confined here, in one line; empty if nothing is missing."""
        missing = []
        if not (self.landlock or self.read_only):
            missing.append("write files of yours")
        if not (network or self.namespaces or self.filters):
            missing.append("use the network")
        if not (self.namespaces or self.landlock):
            missing.append("read the environment of your other processes")
        if not (self.namespaces or self.landlock >= 6):
            missing.append("signal your other processes")
        if not self.filters:
            missing.append("start processes without end")
        return ", ".join(missing)


def available(network: bool = False) -> Confinement:
    """Find out what the kernel allows this user; a separate process tries what cannot be queried."""
    code = _tried_namespaces(network)
    return Confinement(code in (0, 2), code == 0, landlock_version(), _has_filters())


def environment(named: tuple[str, ...], scratch: Path) -> dict[str, str]:
    """The environment of a reward's process, with the variables `named` by `data.reward_environment`."""
    kept = {name: os.environ[name] for name in (*KEPT_VARIABLES, *named) if name in os.environ}
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**own, "PYTHONHASHSEED": "0", **kept}  # whichever process computes a reward, sets have the same order


def _tried_namespaces(network: bool) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        code = 0 if enter_namespaces(Path(tempfile.gettempdir()), network) else 2
    finally:
        os._exit(code)


def enter_namespaces(scratch: Path, network: bool) -> bool:
    """Put this single-threaded process into namespaces; its next child is the first process inside.

    A small file system replaces `scratch`. Returns whether all other mounts are read-only. Raises OSError if the kernel
    refuses, perhaps half-way.
    """
    user, group = os.getuid(), os.getgid()
    clone_newns, clone_newipc, clone_newuser, clone_newpid, clone_newnet = 0x20000, 0x8000000, 2**28, 2**29, 2**30
    flags = clone_newns | clone_newipc | clone_newuser | clone_newpid | (0 if network else clone_newnet)
    _checked(_libc.unshare(flags))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    ms_nosuid, ms_nodev, ms_rec, ms_private = 2, 4, 1 << 14, 1 << 18
    _checked(_libc.mount(None, b"/", None, ms_rec | ms_private, None))
    at_fdcwd, at_recursive, read_only = -100, 0x8000, struct.pack("QQQQ", 1, 0, 0, 0)
    read_only_holds = _call("mount_setattr", at_fdcwd, b"/", at_recursive, read_only, len(read_only)) == 0
    options = f"size={FILE_SIZE},nr_inodes={FILES},mode=700,uid={user},gid={group}".encode()
    _checked(_libc.mount(b"tmpfs", os.fsencode(scratch), b"tmpfs", ms_nosuid | ms_nodev, options))
    return read_only_holds


def limit_resources(timeout: float, base: int) -> None:
    """Limit memory, CPU time and file size of this process, which already uses `base` bytes, and its children."""
    cpu = math.ceil(timeout) + 2
    limits = {
        resource.RLIMIT_AS: base + MEMORY,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_FSIZE: FILE_SIZE,
        resource.RLIMIT_CORE: 0,
    }
    for kind, wanted in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))


def address_space() -> int:
    """The bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def confine(scratch: Path, held: Confinement, *, network: bool, processes: bool) -> int | None:
    """Irrevocably restrict this process and its descendants to what a reward needs.

    It may write only in `scratch`, which namespaces also put in the place of `/dev/shm`, where `multiprocessing` has
    its locks. Returns the file descriptor with which `grant_process` must be called for each requested process; None if
    none can be granted. Raises OSError if the kernel refuses what it claimed to support.
    """
    hide_memory(False)  # a private copy for this response, in which programs inspect themselves
    if held.namespaces and Path(SHARED_MEMORY).is_dir():
        ms_bind, clone_newns = 1 << 12, 0x20000
        _checked(_libc.unshare(clone_newns))
        _checked(_libc.mount(os.fsencode(scratch), SHARED_MEMORY.encode(), None, ms_bind, None))
    pr_set_no_new_privs = 38
    _checked(_libc.prctl(pr_set_no_new_privs, 1, 0, 0, 0))
    _checked(_call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24)))  # no capabilities, even as root
    if held.landlock:
        _allow_writing(scratch, held.landlock, network)
    return _filter_calls(held, network, processes) if held.filters else None


def landlock_version() -> int:
    """Landlock's ABI version; 0 if the kernel lacks Landlock."""
    return max(0, _call("landlock_create_ruleset", None, 0, 1))


def _allow_writing(scratch: Path, version: int, network: bool) -> None:
    rights = 1 << 1 | sum(1 << bit for bit in range(4, 13)) | (1 << 13) * (version >= 2) | (1 << 14) * (version >= 3)
    tcp = 0 if network else 3
    attributes = struct.pack("QQQ", rights, tcp, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    to_write_and_truncate = rights & (1 << 1 | 1 << 14)
    _allow(attributes, {scratch: rights, Path(os.devnull): to_write_and_truncate})


def limit_reading() -> None:
    """Irrevocably restrict reading, for this process and its descendants, to system, Python and current folder.

    Does nothing on a kernel without Landlock.
    """
    if landlock_version():
        places = [path for path in map(Path, (*SYSTEM, sys.prefix, sys.base_prefix, os.curdir)) if path.exists()]
        read, execute_and_list = 1 << 2, 1 << 0 | 1 << 3
        allowed = {path: read | execute_and_list * path.is_dir() for path in places}
        _allow(struct.pack("Q", read | execute_and_list), allowed)


def _allow(attributes: bytes, allowed: Mapping[Path, int]) -> None:
    rules = _checked(_call("landlock_create_ruleset", attributes, len(attributes), 0))
    for path, rights in allowed.items():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _checked(_call("landlock_add_rule", rules, 1, struct.pack("=Qi", rights, place), 0))
        os.close(place)
    _checked(_call("landlock_restrict_self", rules, 0))
    os.close(rules)


_ALLOW, _ERRNO, _KILL, _NOTIFY = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
"""Return values of a filter (linux/seccomp.h)."""


def _has_filters() -> bool:
    if platform.machine() not in _ARCHITECTURES:
        return False
    get_action_available = 2
    return all(
        _call("seccomp", get_action_available, 0, struct.pack("I", action)) == 0 for action in (_ERRNO, _KILL, _NOTIFY)
    )


def _filter_calls(held: Confinement, network: bool, processes: bool) -> int | None:
    program = _program(held, network, processes)
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    set_mode_filter, new_listener = 1, 8
    found = _checked(_call("seccomp", set_mode_filter, new_listener if processes else 0, described))
    return found if processes else None


def _program(held: Confinement, network: bool, processes: bool) -> bytes:
    load, jump_equal, jump_at_least, jump_set, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    to_start = _NOTIFY if processes else _ERRNO | EPERM
    steps: list[tuple[int, int, int, int]] = [(load, 0, 0, 4)]  # the architecture
    steps += [(jump_equal, 1, 0, _ARCHITECTURES[platform.machine()]), (answer, 0, 0, _KILL), (load, 0, 0, 0)]
    if _X86:  # the numbers of x32
        steps += [(jump_at_least, 0, 1, 0x40000000), (answer, 0, 0, _ERRNO | EPERM)]
    denied = [_number(name) for name in _DENIED]
    denied += [] if network else [_number("socket")]
    denied += [] if held.read_only else list(_CHANGES_OF_MODE[0 if _X86 else 1])
    denied += [] if processes else [_number("execve"), _number("execveat"), _number("pidfd_send_signal")]
    for number in denied:
        steps += [(jump_equal, 0, 1, number), (answer, 0, 0, _ERRNO | EPERM)]
    for number in _FORKS:
        steps += [(jump_equal, 0, 1, number), (answer, 0, 0, to_start)]
    steps += [(jump_equal, 0, 1, _number("clone3")), (answer, 0, 0, _ERRNO | ENOSYS)]  # libc then falls back on clone
    new_namespaces, thread = 0x7E020080, 0x10000
    steps += [(jump_equal, 0, 6, _number("clone")), (load, 0, 0, 16)]  # the low half of the first argument
    steps += [(jump_set, 0, 1, new_namespaces), (answer, 0, 0, _ERRNO | EPERM)]
    steps += [(jump_set, 1, 0, thread), (answer, 0, 0, to_start), (answer, 0, 0, _ALLOW)]
    steps += [(jump_equal, 0, 3, _number("kill")), (load, 0, 0, 16)]
    steps += [(jump_equal, 0, 1, 0xFFFFFFFF), (answer, 0, 0, _ERRNO | EPERM)]  # all that it may signal
    steps += [(answer, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def grant_process(listener: int, granted: int) -> int:
    """Answer one request for a process, when `listener` is readable; return how many are granted now."""
    receive, send, go_on = 0xC0502100, 0xC0182101, 1
    request = bytearray(80)
    try:
        fcntl.ioctl(listener, receive, request)
        number = struct.unpack_from("Q", request)[0]
        allowed = granted < PROCESSES
        fcntl.ioctl(listener, send, struct.pack("QqiI", number, 0, 0 if allowed else -EAGAIN, go_on if allowed else 0))
    except OSError:  # the requester is gone
        return granted
    return granted + 1


def end_all_children(child: int, held: Confinement) -> None:
    """End a child of this process and all its descendants, and wait for them."""
    waiting = [-1 if held.namespaces else child]  # -1: all of the namespace but this process
    with suppress(ChildProcessError):
        while True:
            for process in waiting:
                with suppress(ProcessLookupError):  # already ended
                    os.kill(process, signal.SIGKILL)
            for process in waiting:
                os.waitpid(process, 0)
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises once none is left
            waiting = [-1] if held.namespaces else [found.pid for found in psutil.Process().children()]


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends before them."""
    pr_set_child_subreaper = 36
    _checked(_libc.prctl(pr_set_child_subreaper, 1, 0, 0, 0))


def hide_memory(hidden: bool = True) -> None:
    """Forbid, or allow again, that other processes of the user access this one's memory."""
    pr_set_dumpable = 4
    _checked(_libc.prctl(pr_set_dumpable, int(not hidden), 0, 0, 0))


def _number(name: str) -> int:
    return _NUMBERS[name][0 if _X86 else 1]


def _call(name: str, *arguments: object) -> int:
    """Make a system call for which the C library has no function."""
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(_libc.syscall(ctypes.c_long(_number(name)), *words))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
