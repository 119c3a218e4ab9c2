"""The file with a job's secrets, `cluster.environment_file`: who may read it, and what its lines say."""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

from specrl.config import ConfigError
from specrl.config.text import is_control

KEY = "cluster.environment_file"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_BYTES = 2**20


def read_environment_file(path: Path) -> dict[str, str]:
    """The variables that a file of `NAME=VALUE` lines sets; blank lines and those that begin with # set none.

    A value is the rest of its line as it stands there: nothing is expanded, and quotes belong to it.

    Raises:
        ConfigError: The file is missing, is not this user's alone, or has another line; none is ever quoted.
    """
    lines = _private_text(path).split("\n")
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition("=")
        if not separator or not NAME.fullmatch(name) or any(is_control(character) for character in value):
            raise ConfigError(
                f"{KEY} = {str(path)!r}: line {number} must be NAME=VALUE, without export or control characters"
            )
        variables[name] = value
    return variables


def _private_text(path: Path) -> str:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            _check_private(path, os.fstat(file.fileno()))  # of the open file: one that takes its place is not read
            return file.read(MAX_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{KEY} = {str(path)!r} cannot be read on {os.uname().nodename}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{KEY} = {str(path)!r} must be UTF-8 text") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # for the other end of a pipe


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{KEY} = {str(path)!r} must be a file")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{KEY} = {str(path)!r} belongs to user {status.st_uid}: it must be your own")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{KEY} = {str(path)!r} is open to others (mode {stat.S_IMODE(status.st_mode):o}): "
            f"run chmod 600 {shlex.quote(str(path))}, and replace the secrets in it"
        )
