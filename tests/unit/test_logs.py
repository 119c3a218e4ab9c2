"""Every rank's log tells what it does, and what it did when it died."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

KILLED = """
import os, signal
from specrl import logs
logs.set_up("info")
with logs.phase("loading of the policy"):
    pass
with logs.step(12), logs.phase("generation"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
RAISES = """
from specrl import logs
logs.set_up("{level}")
with logs.phase("export of the drafter"):
    raise FloatingPointError("no number")
"""


def run(program: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and the lines on standard error of a Python program."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


def test_a_rank_killed_in_a_phase_leaves_the_name_of_the_phase_in_its_log() -> None:
    code, lines = run(KILLED, RANK="3")
    assert code == -signal.SIGKILL
    assert len(lines) == 3
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    rank 3  "
        r"loading of the policy took \d+\.\d s, \d+\.\d s of CPU",
        lines[1],
    )
    assert lines[-1].endswith("INFO    rank 3 step 12  generation begins")


def test_a_phase_that_raises_says_so_even_where_only_errors_are_logged() -> None:
    code, lines = run(RAISES.format(level="error"), RANK="1")
    assert code == 1
    assert re.search(r"ERROR   rank 1  export of the drafter failed after \d+\.\d s: FloatingPointError$", lines[0])
    assert lines[1].startswith("Traceback")


ROTATES = """
import os, sys
from specrl import logs
for number in range(3):
    print("x" * 1000, file=sys.stderr)
    logs.rotate(500)
    logs.rotate(500)
    print("line", number, file=sys.stderr, flush=True)
"""


def test_a_long_log_begins_anew_and_the_lines_before_lie_beside_it(tmp_path: Path) -> None:
    log = tmp_path / "7_0_log.out"
    for mode, begins_anew in (("ab", True), ("wb", False)):  # nobody else may write at a place of his own
        with log.open(mode) as file:
            subprocess.run([sys.executable, "-c", ROTATES], stderr=file, check=True)
        assert (log.read_text() == "line 2\n") == begins_anew
        log.unlink()
    assert (tmp_path / "7_0_log.out.1").read_text() == "line 1\n" + "x" * 1000 + "\n"
    subprocess.run([sys.executable, "-c", ROTATES], stderr=subprocess.PIPE, check=True)  # as on a terminal
