"""`specrl bench exchange`: both ways one after another, each with fresh ranks, then the rows and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from specrl.artifacts import write_json
from specrl.bench.exchange.one_rank import ARRAYS, PICKLED, Cost
from specrl.bench.exchange.page import write_page
from specrl.bench.job import BenchJob, say
from specrl.bench.pages import write_rows
from specrl.bench.settings import ExchangeSettings
from specrl.processes import free_port


def main(job: BenchJob) -> None:
    """Measure both ways `repeats` times in turn, and write the rows and the page."""
    settings = ExchangeSettings.model_validate(job.settings)
    settings_path = job.run_dir / "settings.json"
    write_json(settings_path, job.settings)
    rounds: dict[str, list[list[Cost]]] = {ARRAYS: [], PICKLED: []}
    for _ in range(settings.repeats):
        for way, found in rounds.items():
            found.append(run_ranks(settings_path, way, settings.ranks, job.run_dir))
            worst = max(sum(cost.seconds.values()) for cost in found[-1])
            say(f"{way}: {worst:.2f} s, {max(sum(cost.received.values()) for cost in found[-1]) / 1e6:.1f} MB")
    rows = [
        {"way": way, "round": number, "rank": rank, **asdict(cost)}
        for way, found in rounds.items()
        for number, costs in enumerate(found)
        for rank, cost in enumerate(costs)
    ]
    write_rows(job.json_path, rows)
    write_page(job, settings, rounds)


def run_ranks(settings_path: Path, way: str, num_ranks: int, folder: Path) -> list[Cost]:
    """Return what each rank measured of one way, in processes of their own.

    Raises:
        RuntimeError: A rank failed.
    """
    place = {**os.environ, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "specrl.bench.exchange.one_rank"]
    arguments = [str(settings_path), way, str(folder), str(os.getpid())]
    ranks = [
        subprocess.Popen([*command, *arguments], env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"bench exchange: a rank of the way {way!r} failed; its error stands above")
    paths = [folder / f"{way}-{rank}.json" for rank in range(num_ranks)]
    return [Cost(**json.loads(path.read_text())) for path in paths]
