"""The engines of `specrl bench rollouts`.

There are one or two for plain decoding, one for each draft method, and vLLM as it comes.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from specrl.bench.job import say
from specrl.bench.rollouts.rounds import DefaultVariant, Variant, Workload, measure
from specrl.bench.settings import ADAPTIVE, TAIL, TAIL_SIZE, RolloutSettings, methods_of, middle_of, speculation_of
from specrl.bench.subject import Subject
from specrl.config import Config
from specrl.config.methods import METHODS
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.engine import Engine, Request, start_engine
from specrl.rollout.matched import LOG_FILE
from specrl.rollout.vllm.default_engine import DefaultEngine, GpuShare

PLAIN = "none"
GPU_SHARE = 0.85
"""The share of a GPU's memory that all engines have together."""
KV_CACHE_GIB = 0.5
"""The largest KV cache of an engine on a CPU, in GiB, since all engines exist at once."""


class Engines:
    """All engines of the benchmark: for each draft method the faster of an eager and a compiled one.

    All but vLLM's default engine are in this process.
    """

    default: DefaultVariant

    def __init__(self, subject: Subject, settings: RolloutSettings) -> None:
        self.subject = subject
        self.settings = settings
        self.methods = methods_of(settings, subject.config)
        self.drafting: dict[str, Variant] = {}
        self._controllers: dict[tuple[str, str], Controller] = {}
        most = len(self._choices()) + 2 + len(self.methods)  # plain ones, vLLM's own, and the first method's two
        self._gpu_share = min(subject.config.engine.gpu_memory_fraction, GPU_SHARE / most)
        self.plain_variants = [self._variant(PLAIN, 0, compiled) for compiled in self._choices()]

    def _choices(self) -> tuple[bool, ...]:
        """Return the values of `compile` to try for the next engine.

        Both are tried for plain decoding and for the first draft method, which decides for the other methods, since
        each compilation takes a minute or more on a CPU.
        """
        if self.drafting:
            return (next(iter(self.drafting.values())).compiled,)
        return (False, True) if self.settings.compile else (False,)

    def add_default(self, lengths: Mapping[int, int], local_rank: int, folder: Path) -> None:
        """Start vLLM's default engine.

        Args:
            lengths: The length of the response to each request of the workloads, by the request's seed.
            local_rank: The number of this rank's GPU among those that it sees.
            folder: The folder for what the engine prints.

        Raises:
            DefaultEngineError: It did not start.
        """
        config, started = self._config(PLAIN, self.settings.compile), time.monotonic()
        gpu = GpuShare.beside(config, local_rank)
        engine = DefaultEngine(self.subject.policy_dir, config, folder / LOG_FILE, gpu=gpu)
        self.default = DefaultVariant(engine, lengths)
        say(f"engine of vLLM as it comes: started in {time.monotonic() - started:.0f} s ({engine.facts})")

    def add_methods(self, pilot: Workload, stored: dict[tuple[int, ...], list[list[int]]]) -> None:
        """Start the engines of the draft methods, and keep the one that is faster on `pilot`, eager or compiled.

        Args:
            pilot: The workload on which the two are compared.
            stored: Responses by prompt, from which methods with replay draft.
        """
        for method in self.methods:
            self.drafting[method] = self._fastest(method, pilot, stored)
            gc.collect()  # frees the memory of the slower engine for the next method

    def _fastest(self, method: str, pilot: Workload, stored: dict[tuple[int, ...], list[list[int]]]) -> Variant:
        variants = [self._variant(method, self.middle_k, compiled) for compiled in self._choices()]
        for variant in variants:
            if variant.engine.replays:
                variant.engine.set_replay(stored)
        if len(variants) == 1:
            return variants[0]
        measured = zip(variants, measure(variants, pilot), strict=True)
        best, *others = [variant for variant, entry in sorted(measured, key=lambda pair: -median(pair[1].rates))]
        for other in others:
            other.engine.shutdown()
        return best

    @property
    def configs(self) -> list[Config]:
        """The configurations of the engines of the draft methods, before one is chosen to be compiled."""
        return [self._config(method, compiled) for method in self.methods for compiled in self._choices()]

    @property
    def profiled(self) -> Variant | None:
        """The variant that is profiled, which drafts with a trained drafter alone; None if there is none."""
        alone = (name for name in self.drafting if METHODS[name].model == "drafter" and not METHODS[name].texts)
        return next((self.drafting[name] for name in alone), None)

    @property
    def middle_k(self) -> int:
        """The middle one of the fixed draft lengths, in tokens, which stands for the others; the lower of two."""
        return middle_of(self.settings.ks) or self.subject.config.speculation.k or 3

    def variants(self, workload: Workload) -> list[Variant]:
        """Return the variants that are compared with plain decoding on this workload."""
        return [
            replace(variant, k=k, controller=self._controller(method, k))
            for method, variant in self.drafting.items()
            for k in self._lengths(method, workload)
        ]

    def _controller(self, method: str, k: int | str) -> Controller | None:
        """Return the controller of a variant, which has one of its own for all batch sizes; None for fixed lengths."""
        if isinstance(k, int):
            return None
        engine = self.drafting[method].engine
        if (method, k) not in self._controllers:
            settings = ControlSettings() if k == ADAPTIVE else replace(ControlSettings(), worthwhile=math.inf)
            lengths = engine.max_k, engine.max_replay_k
            self._controllers[method, k] = Controller(*lengths, self.subject.config.seed, settings)
        return self._controllers[method, k]

    def _lengths(self, method: str, workload: Workload) -> Sequence[int | str]:
        """Return every k for a drafter, and fewer where stored text or the long tail makes runs costly."""
        ks, in_tail = self.settings.ks, workload.name == TAIL
        adaptive = [k for k in ks if isinstance(k, str)]
        if not adaptive:
            return ks
        row = METHODS[method]
        if row.texts or (in_tail and not row.has_weights):
            return adaptive
        return [self.middle_k, *adaptive] if in_tail or row.model is None else ks

    def _variant(self, method: str, k: int, compiled: bool) -> Variant:
        config = self._config(method, compiled)
        started = time.monotonic()
        drafter_dir = self.subject.drafter_dir if method != PLAIN else None
        engine = start_engine(config, self.subject.policy_dir, drafter_dir, gpu_share=self._gpu_share)
        variant = Variant(method, k, engine, compiled)
        say(f"engine {method}, {variant.kind}: started in {time.monotonic() - started:.0f} s")
        return variant

    def _config(self, method: str, compiled: bool) -> Config:
        config = self.subject.config
        longest = max([k for k in self.settings.ks if isinstance(k, int)], default=self.middle_k)
        speculation = speculation_of(config.speculation, method, longest if method != PLAIN else 0)
        largest = max([TAIL_SIZE if batch == TAIL else int(batch) for batch in self.settings.batches])
        engine = config.engine.model_copy(
            update={
                "compile": compiled,
                "max_num_seqs": max(config.engine.max_num_seqs, largest),
                "gpu_memory_fraction": self._gpu_share,
                "kv_cache_gib": min(config.engine.kv_cache_gib, KV_CACHE_GIB),
            }
        )
        return config.model_copy(update={"speculation": speculation, "engine": engine})

    def shutdown(self) -> None:
        """Stop all engines."""
        for variant in [*self.plain_variants, *self.drafting.values()]:
            variant.engine.shutdown()
        self.default.engine.shutdown()


def stored_responses(engine: Engine, requests: Sequence[Request]) -> dict[tuple[int, ...], list[list[int]]]:
    """Return the engine's responses to these requests by prompt, to be replayed as stored text."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for request, response in zip(requests, engine.generate(list(requests)).responses, strict=True):
        found.setdefault(tuple(request.prompt_tokens), []).append(response.tokens)
    return found
