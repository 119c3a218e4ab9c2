"""The engines of `specrl bench rollouts`: plain decoding, each draft method, and stock vLLM."""

from __future__ import annotations

import time
from pathlib import Path

from specrl.bench.job import Subject, say
from specrl.bench.options import ADAPTIVE, RolloutOptions
from specrl.bench.rollouts.rounds import Variant
from specrl.bench.stock import StockEngine
from specrl.config import Config, SpeculationConfig
from specrl.config.methods import METHODS
from specrl.rollout.engine import Engine, StoredText, start_engine

PLAIN = "none"
GPU_SHARE = 0.85  # of a GPU's memory, for all engines together
KV_CACHE_GIB = 0.5  # at most, on a CPU, where all engines exist at once


class Engines:
    """The engines of one run; `variants` are compared, plain decoding first."""

    def __init__(self, subject: Subject, options: RolloutOptions) -> None:
        self.subject, self.options = subject, options
        self.methods = options.methods_of(subject.config)
        self._share = min(subject.config.engine.gpu_memory_fraction, GPU_SHARE / (2 + len(self.methods)))
        self.variants = [Variant({"method": PLAIN}, 0, self._engine(PLAIN))]

    def start_stock(self, folder: Path) -> StockEngine:
        return StockEngine(self.subject.policy_dir, self._config(PLAIN), folder / "stock.log")

    def add_methods(self, stored: list[StoredText]) -> None:
        """Start an engine for each draft method and k.

        Methods with replay draft from `stored` responses, only with the `adaptive` k if it is requested.
        """
        for method in self.methods:
            engine, ks = self._engine(method), self.options.ks
            if engine.replays:
                engine.set_replay(stored)
                ks = (ADAPTIVE,) if ADAPTIVE in ks else ks
            self.variants += [Variant({"method": method}, k, engine) for k in ks]

    def _engine(self, method: str) -> Engine:
        started = time.monotonic()
        drafter_dir = self.subject.drafter_dir if method != PLAIN else None
        engine = start_engine(self._config(method), self.subject.policy_dir, drafter_dir, gpu_share=self._share)
        say(f"engine {method}: started in {time.monotonic() - started:.0f} s")
        return engine

    def _config(self, method: str) -> Config:
        config = self.subject.config
        longest = max([k for k in self.options.ks if isinstance(k, int)], default=3)
        speculation = speculation_of(config.speculation, method, longest if method != PLAIN else 0)
        engine = {
            "gpu_memory_fraction": self._share,
            "kv_cache_gib": min(config.engine.kv_cache_gib, KV_CACHE_GIB),
            "max_num_seqs": max(config.engine.max_num_seqs, *self.options.batches),
        }
        return config.model_copy(update={"speculation": speculation}).updated(engine=engine)

    def shutdown(self) -> None:
        for engine in {variant.engine for variant in self.variants}:
            engine.shutdown()


def speculation_of(run: SpeculationConfig, method: str, k: int) -> SpeculationConfig:
    draft_model = run.draft_model if METHODS[method].model == "draft_model" else None
    return SpeculationConfig.model_validate(run.model_dump() | {"method": method, "k": k, "draft_model": draft_model})
