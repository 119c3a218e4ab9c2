"""Kill parts of a run at random moments, or fill its disk, and see whether it ends as an undisturbed one does.

    python -m tests.kills FOLDER --kills 20 --seed 1 [--disk MOUNTED]

Runs `configs/smoke.toml` through the command line, with a checkpoint after every step and a real MLflow server. The
first run is left alone. In the others, one process at a time gets SIGKILL: the flow, Prefect's server, the job's
controller, a rank, a reward worker or the MLflow server, which comes back after a while. A flow that ended is resumed.

With `--disk`, a folder on a small file system of its own (`mount -t tmpfs -o size=4g none MOUNTED`), further runs lie
there, and the disk is filled at the moments of `FULL_AT`, until the flow has ended; then it gets room and is resumed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from specrl.processes import free_port
from tests.integration.pipeline_runs import assert_same_result, finish, outside_of_groups, run_smoke, specrl, wait_for

PAUSE_SECONDS = (4.0, 20.0)
"""The shortest and the longest time between two kills."""
AWAY_SECONDS = (2.0, 25.0)
"""How long a killed MLflow server stays away."""
RUN_SECONDS = 1800.0
FULL_AT = {
    "checkpoint": "stages/train-*/checkpoints/*",
    "rollouts": "stages/train-*/steps/*",
    "summary": "stages/export-*/result.json",
}
"""What is written when the disk gets full: the first file that a run has just before."""


@dataclass
class MlflowServer:
    """A tracking server that can be killed, and comes back at the time it was given."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    back_at: float = 0.0

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        artifacts = ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**outside_of_groups(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen([*command, *store, *artifacts], env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self.process is not None
        for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            process.kill()
        self.process.wait()
        self.process = None

    def come_back(self) -> None:
        """Start again if it is time to."""
        if self.process is None and time.monotonic() > self.back_at:
            self.start()


@dataclass
class Disturbed:
    """A run whose parts are killed."""

    runs_dir: Path
    server: MlflowServer
    generator: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    """The last line of every flow that ended without finishing the run."""

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / "smoke"

    def run(self, num_kills: int) -> bool:
        """Run to the end, with at most `num_kills` kills on the way; return whether it finished."""
        flow = start(self.runs_dir, self.server.uri)
        next_kill, end = self._next(), time.monotonic() + RUN_SECONDS
        while time.monotonic() < end:
            self.server.come_back()
            if flow.poll() is not None:
                output, _ = flow.communicate()
                if flow.returncode == 0:
                    return True
                self.lines.append(output.strip().splitlines()[-1] if output.strip() else f"exit {flow.returncode}")
                flow = specrl("resume", "smoke", "--runs-dir", str(self.runs_dir))
            if sum(self.kills.values()) < num_kills and time.monotonic() > next_kill:
                self._kill(flow)
                next_kill = self._next()
            time.sleep(0.1)
        flow.kill()
        return False

    def _next(self) -> float:
        return time.monotonic() + self.generator.uniform(*PAUSE_SECONDS)

    def _kill(self, flow: subprocess.Popen[str]) -> None:
        found = targets(self.run_dir, flow)
        if self.server.process is not None:
            found["MLflow server"] = []
        kind = self.generator.choice(sorted(found))
        if kind == "MLflow server":
            self.server.kill()
            self.server.back_at = time.monotonic() + self.generator.uniform(*AWAY_SECONDS)
        else:
            self.generator.choice(found[kind]).kill()
        self.kills[kind] += 1
        print(f"{time.strftime('%H:%M:%S')} killed: {kind}", flush=True)


def targets(run_dir: Path, flow: subprocess.Popen[str]) -> dict[str, list[psutil.Process]]:
    """Return the living processes of a run by kind."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter(["cmdline", "pid"]):
        words = process.info["cmdline"] or []
        ours = any(str(run_dir) in word for word in words)
        if process.info["pid"] == flow.pid:
            found.setdefault("flow", []).append(process)
        elif "flows.server" in words and process.ppid() == flow.pid:
            found.setdefault("Prefect server", []).append(process)
        elif ours and "slurm.local_controller" in words:
            found.setdefault("controller", []).append(process)
        elif ours and "slurm.entry" in words:
            found.setdefault("rank", []).append(process)
            if children := process.children(recursive=True):
                found.setdefault("reward worker", []).extend(children)
    return found


def start(runs_dir: Path, uri: str) -> subprocess.Popen[str]:
    return run_smoke(runs_dir, "--set", "train.checkpoint_every=1", "--set", f"tracking.uri={uri}")


def disturb(folder: Path, server: MlflowServer, num_kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Disturb runs until `num_kills` kills were made; return the kills by kind and the lines that flows ended with."""
    generator, kills, lines = random.Random(seed), Counter[str](), list[str]()
    while sum(kills.values()) < num_kills:
        run = Disturbed(folder / f"run-{sum(kills.values())}", server, generator)
        assert run.run(num_kills - sum(kills.values())), f"{run.run_dir} has not finished in {RUN_SECONDS} s"
        assert_same_result(folder / "plain" / "smoke", run.run_dir)
        kills, lines = kills + run.kills, lines + run.lines
        done = f"finished, same rollouts, policy and drafter; kills: {dict(run.kills)}"
        print(f"{run.run_dir.parent.name}: {done}", flush=True)
    return kills, lines


def fill_disk(folder: Path, plain: Path, uri: str) -> None:
    """Fill the small disk at each moment of `FULL_AT`, in a run of its own."""
    for moment, pattern in FULL_AT.items():
        runs_dir = folder / moment
        flow = start(runs_dir, uri)
        wait_for(runs_dir / "smoke", pattern)
        ballast = folder / "ballast"
        while flow.poll() is None:
            leave_no_room(ballast)
            time.sleep(0.2)
        output, _ = flow.communicate()
        said = f"{output.strip().splitlines()[-1]} (exit {flow.returncode})"
        ballast.unlink()
        finish(specrl("resume", "smoke", "--runs-dir", str(runs_dir)))
        assert_same_result(plain, runs_dir / "smoke")
        print(f"disk full at {moment}: {said}; resumed: same rollouts, policy and drafter", flush=True)
        shutil.rmtree(runs_dir)


def leave_no_room(ballast: Path) -> None:
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", type=Path, help="a folder on a small file system of its own")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True)
    server = MlflowServer(folder)
    server.start()
    time.sleep(15)
    finish(start(folder / "plain", server.uri))
    started = time.monotonic()
    kills, lines = disturb(folder, server, arguments.kills, arguments.seed)
    for kind, count in sorted(kills.items()):
        print(f"{count:3} {kind}")
    print(f"{sum(kills.values()):3} in {time.monotonic() - started:.0f} s; flows that ended said:")
    for line in lines:
        print(f"    {line}")
    if arguments.disk is not None:
        server.back_at = 0.0
        server.come_back()
        fill_disk(arguments.disk.absolute(), folder / "plain" / "smoke", server.uri)
    if server.process is not None:
        server.kill()


if __name__ == "__main__":
    main()
