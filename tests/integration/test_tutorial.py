"""The tutorial, as a reader follows it, but for the command that needs the disk of a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.forks import outside_of_engines

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "tutorial.md"


def test_every_command_of_the_tutorial_does_what_the_page_says(tmp_path: Path) -> None:
    page, printed = PAGE.read_text(), dict[str, str]()
    for name, text in re.findall(r'```\w+ title="(.*?)"\n(.*?)```', page, re.DOTALL):
        (tmp_path / name).write_text(text)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, module in (("specrl", "-m flows.cli"), ("python", "")):
        (binaries / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (binaries / name).chmod(0o755)
    environment = {**outside_of_engines(), "PATH": f"{binaries}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shown = re.sub(r"```.*?```", "", page.partition("## Train a real model")[0], flags=re.DOTALL)
    commands = re.findall(r"^    (\S.*)$", shown, re.MULTILINE)
    assert commands[0].startswith("export")
    for command in commands[1:]:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        printed[command] = done.stdout
    assert "score: 0" in printed["specrl reward mine.toml --response response.txt"]
    first, last = re.findall(r"reward, training +([\d.]+) -> ([\d.]+)", printed["specrl show mine"])[0]
    assert float(first) < 0.06
    assert float(last) > 0.1
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["validation"]["exactness"]["sampled"]["num_differences"] == 0
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    assert list((tmp_path / "runs" / "mine" / "tensorboard").glob("train-*/events.*"))
