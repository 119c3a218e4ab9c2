"""Kill parts of a run at random moments, or fill its disk, and see whether it ends as an undisturbed one does.

    python -m tests.kills FOLDER --kills 20 --seed 1 [--disk MOUNTED]

Runs `configs/smoke.toml` through the command line, with a checkpoint after every step and a real MLflow server. The
first run, unless FOLDER has it already, is left alone. In the others, one process at a time gets SIGKILL, of the kind
that was killed least often: the flow, Prefect's server, the job's controller, a rank, a reward worker or the MLflow
server, which comes back after a while. A flow that ended is resumed.

With `--disk`, a folder on a small file system of its own (`mount -t tmpfs -o size=1500m none MOUNTED`), further runs
lie there, and the disk is filled at the moments of `FULL_AT`, until the flow has ended; then it gets room and is
resumed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.integration.pipeline_runs import assert_same_result, finish, run_smoke, specrl, wait_for
from tests.mlflow_server import MlflowServer

PAUSE_SECONDS = (5.0, 60.0)
"""The shortest and the longest time between two kills."""
AWAY_SECONDS = (2.0, 25.0)
"""How long a killed MLflow server stays away."""
RUN_SECONDS = 1800.0
NUM_STEPS = 60
FULL_AT = {
    "checkpoint": "stages/train-*/checkpoints/step=*",
    "rollouts": "stages/train-*/rollouts/step=*/*.arrow",
    "summary": "stages/export-*/result.json",
}
"""What is written when the disk gets full: the first file that a run has just before."""
ROOM_BYTES = 256 * 2**20
"""What a run has to write in until then."""
BLOCK = bytes(2**20)
LINES_SHOWN = 4


@dataclass
class Disturbed:
    """A run whose parts are killed."""

    runs_dir: Path
    server: MlflowServer
    generator: random.Random
    before: Counter[str]
    """The kills in earlier runs."""
    server_back_at: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    """The kills by the stage whose job was the newest."""
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
            if self.server.process is None and time.monotonic() > self.server_back_at:
                self.server.start()
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
        fewest = min(
            self.before[kind] + self.kills[kind] for kind in found
        )  # or most kills would hit what is always there
        kind = self.generator.choice(sorted(k for k in found if self.before[k] + self.kills[k] == fewest))
        if kind == "MLflow server":
            self.server.kill()
            self.server_back_at = time.monotonic() + self.generator.uniform(*AWAY_SECONDS)
        else:
            self.generator.choice(found[kind]).kill()
        self.kills[kind] += 1
        self.stages[newest_stage(self.run_dir)] += 1
        print(f"{time.strftime('%H:%M:%S')} killed: {kind}, in {newest_stage(self.run_dir)}", flush=True)


def newest_stage(run_dir: Path) -> str:
    jobs = list((run_dir / "jobs").glob("*-*"))
    return max(jobs, key=lambda job: job.stat().st_ctime).name.partition("-")[0] if jobs else "no stage yet"


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
        elif ours and "slurm.local" in words:
            found.setdefault("controller", []).append(process)
        elif ours and "slurm.entry" in words:
            found.setdefault("rank", []).append(process)
            if children := process.children(recursive=True):
                found.setdefault("reward worker", []).extend(children)
    return found


def start(runs_dir: Path, uri: str) -> subprocess.Popen[str]:
    # Enough steps that kills hit `train`, too.
    settings = (f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=1", f"tracking.uri={uri}")
    return run_smoke(runs_dir, *(word for setting in settings for word in ("--set", setting)))


def disturb(folder: Path, server: MlflowServer, num_kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Disturb runs until `num_kills` kills were made; return the kills by kind and the lines that flows ended with."""
    generator, kills, lines = random.Random(seed), Counter[str](), list[str]()
    while sum(kills.values()) < num_kills:
        run = Disturbed(folder / f"run-{sum(kills.values())}", server, generator, kills)
        assert run.run(num_kills - sum(kills.values())), f"{run.run_dir} has not finished in {RUN_SECONDS} s"
        assert_same_result(folder / "plain" / "smoke", run.run_dir)
        kills, lines = kills + run.kills, lines + run.lines
        done = f"finished, same rollouts, policy and drafter; kills: {dict(run.kills)}, in {dict(run.stages)}"
        print(f"{run.run_dir.parent.name}: {done}", flush=True)
    return kills, lines


def fill_disk(folder: Path, plain: Path, uri: str) -> None:
    """Fill the small disk at each moment of `FULL_AT`, in a run of its own."""
    for moment, pattern in FULL_AT.items():
        runs_dir, ballast = folder / moment, folder / "ballast"
        flow = start(runs_dir, uri)
        wait_for(runs_dir / "smoke", "stages/pretrain-*/result.json")
        take_room(ballast, shutil.disk_usage(folder).free - ROOM_BYTES)  # so that the rest is filled in a moment
        written = wait_for(runs_dir / "smoke", pattern)
        filled_at = time.monotonic()
        while flow.poll() is None:
            take_room(ballast, shutil.disk_usage(folder).total)
            time.sleep(0.1)
        output, _ = flow.communicate()
        print(f"disk full at {moment} ({written.relative_to(runs_dir)}): ", end="")
        print(f"exit {flow.returncode} after {time.monotonic() - filled_at:.0f} s, with")
        for line in output.strip().splitlines()[-LINES_SHOWN:]:
            print(f"    {line}", flush=True)
        ballast.unlink()
        finish(specrl("resume", "smoke", "--runs-dir", str(runs_dir)))
        assert_same_result(plain, runs_dir / "smoke")
        print("    resumed: finished, same rollouts, policy and drafter", flush=True)
        shutil.rmtree(runs_dir)


def take_room(ballast: Path, size: int) -> None:
    """Write so many bytes, or as many as there is room for."""
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        for _ in range(0, size, len(BLOCK)):
            file.write(BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", type=Path, help="a folder on a small file system of its own")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    server = MlflowServer(folder)
    server.start()
    if not (folder / "plain" / "smoke" / "summary.json").exists():
        finish(start(folder / "plain", server.uri))
    started = time.monotonic()
    kills, lines = disturb(folder, server, arguments.kills, arguments.seed)
    for kind, count in sorted(kills.items()):
        print(f"{count:3} {kind}")
    print(f"{sum(kills.values()):3} in {time.monotonic() - started:.0f} s; flows that ended said:")
    for line in lines:
        print(f"    {line}")
    if arguments.disk is not None:
        if server.process is None:
            server.start()
        fill_disk(arguments.disk.absolute(), folder / "plain" / "smoke", server.uri)
    server.kill()


if __name__ == "__main__":
    main()
