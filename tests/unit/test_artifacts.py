"""A file that exists is complete, whoever else writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specrl.artifacts import PrepareResult, atomic_path, read_result, write_json
from specrl.config import ConfigError


def test_two_writers_of_one_file_do_not_write_into_each_others(tmp_path: Path) -> None:
    """Processes of two hosts may have the same number."""
    path = tmp_path / "file"
    with atomic_path(path) as one:
        one.write_text("from one host")
        with atomic_path(path) as other:
            other.write_text("from another host")
            assert one.read_text() == "from one host"
        assert path.read_text() == "from another host"
    assert path.read_text() == "from one host" and list(tmp_path.iterdir()) == [path]


OTHER_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Python then reads and writes text in ASCII, as it does in Latin-1 where a user's locale says so."""


def test_text_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    program = f"import pathlib, specrl.artifacts as a; a.write_text(pathlib.Path({str(tmp_path)!r}) / 'x', '\\xe4')"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **OTHER_LOCALE}, check=True)
    assert (tmp_path / "x").read_bytes() == "ä".encode()


def test_what_a_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "läufe").mkdir()
    said = subprocess.run(
        [sys.executable, "-m", "flows.cli", "ls", "--runs-dir", str(tmp_path / "läufe")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert b"no runs in " in said.stdout and b"l\\xe4ufe" in said.stdout


def test_a_result_of_another_version_is_a_mistake_that_a_command_can_tell(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"of_other_code": 2})
    with pytest.raises(ConfigError, match="is not a PrepareResult of this version; remove the folder to run the stage"):
        read_result(tmp_path, PrepareResult)
