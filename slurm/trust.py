"""The rule for trusting a run's folder, and the program that applies it first in every job.

A job's script contains the text of this file: every rank runs `python -I -c TEXT CODE DIGEST GROUPS -m MODULE ...`,
which imports nothing from the run's folder and then becomes `python -m MODULE ...`. Hence only the standard library is
used here.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

DIGEST_LENGTH = 32  # hex digits: other files with the same 128 bits cannot be constructed
MOST_LINKS = 40  # how many symbolic links Linux follows on one path
WHOLE_MAP = ["0", "0", "4294967295"]  # /proc/self/uid_map of a process outside user namespaces


class DistrustError(Exception):
    """Somebody else can change, or has changed, what a run executes; the message is one line with a remedy."""


def check_run(run_dir: Path) -> None:
    """Check that everything that a run executes or obeys belongs to its user and is writable only by that user.

    This covers the run's folder and its direct contents, the copies of the code, and the jobs' contexts. Results below
    `stages/KEY` are data.
    """
    status = run_dir.stat()
    if status.st_uid != os.geteuid():
        raise DistrustError(
            f"{run_dir} belongs to user {status.st_uid} and not to user {os.geteuid()}, who runs this; jobs run code "
            "from it: specrl ls, show, watch, logs and samples look at it, nothing else does; a run of your own needs "
            "another runs_dir or name"
        )
    _check_mode(run_dir, status, run_dir)
    jobs = _entries(run_dir / "jobs")
    folders = [*_entries(run_dir), *_below(run_dir / "code"), *jobs, *_entries(run_dir / "stages")]
    for path in (*folders, *(folder / "context.json" for folder in jobs)):
        _check_own(path, run_dir)


def _check_own(path: Path, run_dir: Path) -> None:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):  # just replaced, or never there
        return
    if status.st_uid != os.geteuid():
        raise DistrustError(
            f"{path} belongs to user {status.st_uid} and not to user {os.geteuid()}, who runs this, and jobs act on "
            "what is in it: remove it"
        )
    _check_mode(path, status, run_dir)


def _check_mode(path: Path, status: os.stat_result, run_dir: Path) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
        raise DistrustError(
            f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):o}), and jobs run code from it: "
            f"run `chmod -R go-w {run_dir}`, or choose another runs_dir or name"
        )


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _below(folder: Path) -> Iterator[Path]:  # links are not followed
    for path in _entries(folder):
        yield path
        yield from _below(path)


def check_place(run_dir: Path, groups: Collection[int]) -> list[str]:
    """Check that only the user, root and trusted groups can replace a run's folder by another.

    Returns a line for each parent folder in which members of another group could do so.
    """
    owners, notes = _trusted_owners(), []
    for path in _places(run_dir):
        status = path.lstat()
        if status.st_uid not in owners and status.st_gid not in groups:
            raise DistrustError(
                f"{path} belongs to user {status.st_uid}, who can put another folder in the place of {run_dir}: choose "
                f'another runs_dir, or trust its group: cluster.trusted_groups = ["{_group_name(status.st_gid)}"]'
            )
        if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            raise DistrustError(
                f"everybody can write to {path} (mode {stat.S_IMODE(status.st_mode):o}) and put another folder in the "
                f"place of {run_dir}: run `chmod o-w {path}` or `chmod +t {path}`, or choose another runs_dir"
            )
        if status.st_mode & stat.S_IWGRP and not _is_harmless(status.st_gid, groups):
            name = _group_name(status.st_gid)
            notes.append(
                f"note: members of group {name} can write to {path} and put another folder in the place of {run_dir}; "
                f'cluster.trusted_groups = ["{name}"] says that they are trusted'
            )
    return list(dict.fromkeys(notes))  # a path may pass through a folder twice


def _places(run_dir: Path) -> list[Path]:
    here, found = Path("/"), [Path("/")]
    parts = list(reversed(run_dir.absolute().parts[1:]))
    links = 0
    while parts:
        here = here / parts.pop()
        if here.name == "..":
            here = here.parent.parent
        if not os.path.lexists(here):
            return found
        if here.is_symlink():
            links += 1
            if links > MOST_LINKS:
                raise DistrustError(f"{run_dir}: too many links")
            found.append(here)
            target = here.readlink()
            parts += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            here = Path("/") if target.is_absolute() else here.parent
        elif parts:
            found.append(here)
    return found


def _trusted_owners() -> set[int]:
    owners = {os.geteuid(), 0}
    try:
        if Path("/proc/self/uid_map").read_text().split() != WHOLE_MAP:
            owners.add(int(Path("/proc/sys/fs/overflowuid").read_text()))
    except (OSError, ValueError):
        pass
    return owners


def _is_harmless(group: int, groups: Collection[int]) -> bool:
    if group in groups or group == 0:
        return True
    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}


def _group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def sources_digest(root: Path, names: Iterable[str]) -> str:
    """The digest of files, by names below `root` and contents, which names their copy."""
    total = hashlib.sha256()
    for name in sorted(names):
        with (root / name).open("rb") as file:
            total.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()[:DIGEST_LENGTH]


def check_code(code: Path, digest: str) -> None:
    """Check that a folder contains the files with this digest and nothing else that Python could import."""
    run = code.parents[1].name
    advice = f"continue the run with the present code: specrl resume {run} --new-code"
    if code.is_symlink() or not code.is_dir():
        raise DistrustError(f"run {run}: {code}, the code that it was started with, is gone; {advice}")
    names = []
    for path in _below(code):
        if path.name == "__pycache__":
            raise DistrustError(f"{path} has been added to the copy of the code; remove it, or {advice}")
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise DistrustError(f"{path} is neither a file nor a folder, and was not copied there; {advice}")
        if path.is_file():
            names.append(str(path.relative_to(code)))
    if sources_digest(code, names) != digest:
        raise DistrustError(f"the files in {code} are not those that were copied there; {advice}")


def main(words: list[str]) -> None:
    """Check a copy of the code, by its digest, and the run's folder, then become `python` with the other arguments."""
    code, digest, groups, *command = words
    try:
        check_run(Path(code).parents[1])
        check_place(Path(code).parents[1], {int(group) for group in groups.split(",") if group.isdigit()})
        check_code(Path(code), digest)
    except (DistrustError, OSError) as error:
        sys.exit(f"specrl: {error}")
    os.execv(sys.executable, [sys.executable, "-u", *command])


if __name__ == "__main__":
    main(sys.argv[1:])
