"""Measure speculative against plain generation of the same tokens for `specrl bench rollouts`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from specrl.bench.job import say
from specrl.bench.rollouts import machine
from specrl.bench.rollouts.engines import Engines
from specrl.bench.rollouts.roofline import Roofline, drafter_networks, policy_network
from specrl.bench.rollouts.rounds import Measurement, Variant, Workload, differing, measure, strongest
from specrl.bench.subject import Subject
from specrl.bench.tables import Spread, ratios


@dataclass(frozen=True)
class Cell:
    """One variant on one workload, compared with the strongest plain variant of the same rounds."""

    workload: Workload
    variant: Variant
    speedup: Spread
    rate: float
    """Median tokens per second."""
    measured: Measurement
    num_differing: int
    """Number of responses that differ from those of the plain variant."""

    def row(self) -> dict[str, Any]:
        """Return the figures as a row for `--json`."""
        stats = self.measured.stats
        return {
            "method": self.variant.method,
            "k": self.variant.k,
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
    """The seconds that each part of an engine iteration takes, at one batch size."""

    method: str
    """The draft method of the speculative run."""
    batch: int
    plain: dict[str, float]
    speculative: dict[str, float]


def measure_all(engines: Engines, loads: list[Workload]) -> list[Cell]:
    """Run all variants on all workloads, and return their cells, those of plain variants first."""
    cells: list[Cell] = []
    for load in loads:
        started = time.monotonic()
        variants = [*engines.plain_variants, *engines.variants(load)]
        entries = measure(variants, load)
        base = strongest(entries[: len(engines.plain_variants)])
        new = [
            Cell(
                load,
                entry.variant,
                ratios(entry.rates, base.rates),
                Spread.of(entry.rates).median,
                entry,
                differing(entry, base),
            )
            for entry in entries
        ]
        cells += [cell for cell in new if cell.measured is base or cell.variant.k != 0]
        fast = [cell for cell in new if cell.variant.k != 0]
        words = ", ".join(f"{cell.variant.method} k={cell.variant.k} {cell.speedup.median:.2f}x" for cell in fast)
        seconds = time.monotonic() - started
        say(f"batch {load.name}: plain {Spread.of(base.rates).median:.0f} tokens/s; {words} ({seconds:.0f} s)")
    return cells


def profile(engines: Engines, load: Workload) -> Profile:
    """Run the first round once more, plain and with the drafter at the middle k, and time the parts of an iteration."""
    drafting = engines.profiled
    assert drafting is not None
    plain = next(variant for variant in engines.plain_variants if variant.compiled == drafting.compiled)
    times = []
    for variant in (plain, replace(drafting, k=engines.middle_k)):
        with variant.engine.profile() as found:
            variant.generate(load.rounds[0], load.batch)
        times.append(found.per_iteration)
    return Profile(drafting.method, load.batch, *times)


def roofline(subject: Subject, device: torch.device) -> Roofline:
    """Return the roofline of the run's policy and drafter on this machine."""
    config = json.loads((subject.policy_dir / "config.json").read_text())
    dtype = getattr(torch, subject.config.model.dtype)
    measured = machine.measure(config["hidden_size"], config["intermediate_size"], dtype, device)
    drafter = fusion = None
    if subject.drafter_dir is not None:
        drafter_config = json.loads((subject.drafter_dir / "config.json").read_text())
        if "draft_vocab_size" in drafter_config:  # EAGLE-3
            drafter, fusion = drafter_networks(drafter_config, dtype.itemsize)
    return Roofline(policy_network(config, dtype.itemsize), drafter, fusion, measured)
