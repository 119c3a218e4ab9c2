"""`specrl bench rollouts`: speculative against plain generation of the same tokens, and what limits it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch

from specrl.bench import machine, report_rollouts
from specrl.bench.job import BenchJob
from specrl.bench.lineup import Lineup, say, stored_responses
from specrl.bench.pages import write_rows
from specrl.bench.roofline import Roofline, drafter_networks, policy_network
from specrl.bench.rounds import Measured, Side, Workload, differing, measure, strongest
from specrl.bench.settings import TAIL, TAIL_SIZE, RolloutSettings
from specrl.bench.subject import Subject, find_subject
from specrl.bench.tables import Spread, ratios
from specrl.bench.workloads import pool, workloads
from specrl.data.prompts import PromptSource
from specrl.distributed import join, leave
from specrl.models.sources import load_tokenizer

PILOT_BATCH = 4
"""Batch size at which the eager and the compiled engine of a draft source are compared."""
PILOT_ROUNDS = 3


@dataclass(frozen=True)
class Cell:
    """One side on one workload, beside the strongest plain side of the same rounds."""

    workload: Workload
    side: Side
    speedup: Spread
    rate: float
    """Median tokens per second."""
    measured: Measured
    num_differing: int
    """Responses that are not those of the plain side."""

    def row(self) -> dict[str, Any]:
        """As `--json` writes it."""
        stats = self.measured.stats
        return {
            "method": self.side.method,
            "k": self.side.k,
            "batch": self.workload.name,
            "tokens_per_s": self.rate,
            "speedup": self.speedup.median,
            "speedup_min": self.speedup.least,
            "speedup_max": self.speedup.greatest,
            "acceptance_length": stats.acceptance_length,
            "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
            "decode_steps": stats.decode_steps,
        }


@dataclass(frozen=True)
class Profile:
    """Seconds per iteration by part, at one batch size."""

    batch: int
    plain: dict[str, float]
    speculative: dict[str, float]


def main(job: BenchJob) -> None:
    started = time.monotonic()
    ranks = join()
    settings, subject = RolloutSettings.model_validate(job.settings), find_subject(job.run_dir)
    lineup = Lineup(subject, settings)
    source = PromptSource(subject.config, load_tokenizer(subject.policy_dir))
    prompts = source.held_out(min(TAIL_SIZE, subject.config.validate_.num_prompts))
    requests = pool(prompts, subject.config)
    plain = lineup.plains[0].engine
    answers = plain.generate(requests).responses
    loads = workloads(requests, answers, settings.batches, settings.repeats, settings.max_tokens)
    pilot = workloads(requests, answers, [PILOT_BATCH], PILOT_ROUNDS, settings.max_tokens)[0]
    lineup.add_methods(pilot, stored_responses(plain, pool(prompts, subject.config, "bench replay")))
    cells = measure_all(lineup, loads)
    found = report_rollouts.Findings(
        cells=cells,
        profiles=[profile(lineup, load) for load in loads if load.name != TAIL and "eagle3" in lineup.engines],
        roofline=roofline(subject, ranks.device),
        middle_k=lineup.middle_k,
        seconds=time.monotonic() - started,
    )
    write_rows(job.json_path, [cell.row() for cell in cells])
    report_rollouts.write(job, settings, found)
    lineup.shutdown()
    leave()


def measure_all(lineup: Lineup, loads: list[Workload]) -> list[Cell]:
    """All sides on all workloads, plain ones first."""
    cells: list[Cell] = []
    for load in loads:
        started = time.monotonic()
        sides = [*lineup.plains, *lineup.sides(load)]
        entries = measure(sides, load)
        base = strongest(entries[: len(lineup.plains)])
        new = [
            Cell(
                load,
                entry.side,
                ratios(entry.rates, base.rates),
                Spread.of(entry.rates).median,
                entry,
                differing(entry, base),
            )
            for entry in entries
        ]
        cells += [cell for cell in new if cell.measured is base or cell.side.k != 0]
        words = ", ".join(
            f"{cell.side.method} k={cell.side.k} {cell.speedup.median:.2f}x" for cell in new if cell.side.k != 0
        )
        seconds = time.monotonic() - started
        say(f"batch {load.name}: plain {Spread.of(base.rates).median:.0f} tokens/s; {words} ({seconds:.0f} s)")
    return cells


def profile(lineup: Lineup, load: Workload) -> Profile:
    """One more run of the first round, plain and with EAGLE-3 at the middle k, with timers around the parts."""
    eagle = lineup.engines["eagle3"]
    plain = next(side for side in lineup.plains if side.compiled == eagle.compiled)
    times = []
    for side in (plain, Side("eagle3", lineup.middle_k, eagle.engine, eagle.compiled)):
        with side.engine.profile() as found:
            side.generate(load.rounds[0], load.batch)
        times.append(found.per_iteration)
    return Profile(load.batch, *times)


def roofline(subject: Subject, device: torch.device) -> Roofline:
    """Of the run's policy and drafter on this machine."""
    config = json.loads((subject.policy_dir / "config.json").read_text())
    dtype = getattr(torch, subject.config.model.dtype)
    measured = machine.measure(config["hidden_size"], config["intermediate_size"], dtype, device)
    drafter = fusion = None
    if subject.drafter_dir is not None:
        drafter_config = json.loads((subject.drafter_dir / "config.json").read_text())
        if "draft_vocab_size" in drafter_config:  # EAGLE-3
            drafter, fusion = drafter_networks(drafter_config, dtype.itemsize)
    return Roofline(policy_network(config, dtype.itemsize), drafter, fusion, measured)
