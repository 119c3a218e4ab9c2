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
    """One variant on one workload, compared with plain decoding in the same rounds, in two ways."""

    workload: Workload
    variant: Variant
    speedup: Spread
    """The ratio to the strongest plain variant of specrl's own engine, k = 0."""
    over_default: Spread
    """The ratio to vLLM as it comes."""
    default_rate: float
    """Median tokens per second of vLLM as it comes."""
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
            "speedup_over_default": self.over_default.median,
            "default_tokens_per_s": self.default_rate,
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
        *entries, default = measure([*variants, engines.default], load)
        base = strongest(entries[: len(engines.plain_variants)])
        new = [
            Cell(
                workload=load,
                variant=variant,
                speedup=ratios(entry.rates, base.rates),
                over_default=ratios(entry.rates, default.rates),
                default_rate=Spread.of(default.rates).median,
                rate=Spread.of(entry.rates).median,
                measured=entry,
                num_differing=differing(entry, base),
            )
            for variant, entry in zip(variants, entries, strict=True)
        ]
        cells += [cell for cell in new if cell.measured is base or cell.variant.k != 0]
        fast = [cell for cell in new if cell.variant.k != 0]
        words = ", ".join(f"{cell.variant.method} k={cell.variant.k} {cell.speedup.median:.2f}x" for cell in fast)
        seconds = time.monotonic() - started
        plain = f"plain {Spread.of(base.rates).median:.0f} tokens/s, by default {Spread.of(default.rates).median:.0f}"
        say(f"batch {load.name}: {plain}; {words} ({seconds:.0f} s)")
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
