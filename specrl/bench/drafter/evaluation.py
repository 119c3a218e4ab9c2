"""Drafters on a file of prompts: acceptance, and the speed of generation with and without them, in matched rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specrl.bench.drafter.candidates import NGRAM_LOOKUP, NO_DRAFTS, Candidate, adopted, read_candidate
from specrl.bench.drafter.questions import Question, read_questions
from specrl.bench.job import say
from specrl.bench.options import DrafterOptions
from specrl.bench.rollouts.rounds import Measurement, Variant, Workload, compared, differing, measure
from specrl.bench.spread import ratios
from specrl.config import Config, ConfigError
from specrl.models.checks.folder import check_directory
from specrl.models.sources import load_tokenizer
from specrl.rollout.engine import Engine, Generation, Request, response_seed
from specrl.rollout.vllm.engine.arguments import gpu_memory

GPU_SHARE = 0.85
"""The share of a GPU's memory that all engines have together."""
LARGEST_CACHE_GIB = 4.0
"""The largest KV cache of an engine on a CPU; requests that do not fit wait for others."""
SPARE = 1.25
"""How much larger a KV cache on a CPU is than its requests, for blocks that are not full."""


class Evaluation:
    """The policy, the questions, and an engine for n-gram lookup and one for each drafter."""

    def __init__(self, options: DrafterOptions, folder: Path) -> None:
        """Read the questions and start the engines.

        Args:
            folder: The folder for drafters in the layout that the engine loads.
        """
        assert options.model is not None and options.data is not None
        self.options, self.policy_dir = options, options.model
        self.hf_config = check_directory(options.model, max_length=1)
        positions = int(self.hf_config.get("max_position_embeddings", 2**20))
        if options.max_tokens >= positions:
            raise ConfigError(f"--max-tokens {options.max_tokens}: the policy has {positions} positions; ask for less")
        tokenizer, longest = load_tokenizer(options.model), positions - options.max_tokens
        self.questions, self.too_long = read_questions(
            options.data, options.template, tokenizer, longest, options.prompts
        )
        self.max_length = max(len(question.tokens) for question in self.questions) + options.max_tokens
        found = [read_candidate(drafter, options.model) for drafter in options.drafters]
        self.candidates = [adopted(one, options.model, folder / str(index)) for index, one in enumerate(found)]
        engines = {candidate: self._engine(candidate) for candidate in (NGRAM_LOOKUP, *self.candidates)}
        self.variants = [
            (NO_DRAFTS, Variant(NO_DRAFTS.kind, 0, engines[NGRAM_LOOKUP])),
            *((one, Variant(one.kind, k, engine)) for one, engine in engines.items() for k in options.ks),
        ]

    def measure(self, save: Callable[[list[dict[str, Any]]], None]) -> None:
        """Run all variants at all temperatures and batch sizes; hand over all rows so far after each of these."""
        rows: list[dict[str, Any]] = []
        for batch in self.options.batches:
            for temperature in self.options.temperatures:
                found = measure([variant for _, variant in self.variants], self._workload(batch, temperature))
                rows += self._rows(found, batch, temperature)
                save(rows)
                drafted = rows[1 - len(self.variants) :]
                words = (f"{row['drafter']} k={row['k']} {row['speedup']:.2f}x" for row in drafted)
                say(f"batch {batch}, temperature {temperature:g}: {', '.join(words)}")

    def shutdown(self) -> None:
        """Stop all engines."""
        for engine in {id(variant.engine): variant.engine for _, variant in self.variants}.values():
            engine.shutdown()

    def _rows(self, found: Sequence[Measurement], batch: int, temperature: float) -> list[dict[str, Any]]:
        plain = found[0]
        lookups = {
            variant.k: one
            for (drafter, variant), one in zip(self.variants, found, strict=True)
            if drafter is NGRAM_LOOKUP
        }
        return [
            {
                "drafter": drafter.name,
                "kind": drafter.kind,
                "layers": drafter.layers,
                "loss": drafter.loss,
                "notes": list(drafter.notes),
                "k": variant.k,
                "temperature": temperature,
                "batch": batch,
                **compared(own, plain),
                "speedup_over_ngram": ratios(own.rates, lookups.get(variant.k, plain).rates).median,
                "responses_equal": 1 - differing(own, plain) / len(plain.tokens),
                "by_category": self._by_category(own, plain, batch),
            }
            for (drafter, variant), own in zip(self.variants, found, strict=True)
        ]

    def _by_category(self, own: Measurement, plain: Measurement, batch: int) -> dict[str, Any]:
        names = [category for category, _ in self._parts(batch)]
        return {
            name: compared(*(_part(one, [other == name for other in names]) for one in (own, plain)))
            for name in dict.fromkeys(names)
        }

    def _parts(self, batch: int) -> list[tuple[str, list[Question]]]:
        """Divide the questions into batches of one category each; with too few questions some are asked again."""
        by_category: dict[str, list[Question]] = {}
        for question in self.questions:
            by_category.setdefault(question.category, []).append(question)
        return [
            (category, [asked[place % len(asked)] for place in range(start, start + batch)])
            for category, asked in by_category.items()
            for start in range(0, len(asked), batch)
        ]

    def _workload(self, batch: int, temperature: float) -> Workload:
        """Make the rounds, in each of which the responses have other seeds."""
        places = [(place, question) for _, part in self._parts(batch) for place, question in enumerate(part)]
        rounds = [
            [
                Request(
                    question.tokens, response_seed(0, turn, question.id, place), self.options.max_tokens, temperature
                )
                for place, question in places
            ]
            for turn in range(self.options.repeats)
        ]
        return Workload(batch, batch, rounds)

    def _engine(self, candidate: Candidate) -> Engine:
        own = candidate.folder is not None and candidate.folder.resolve() == self.policy_dir.resolve()
        drafter_dir = candidate.folder if candidate.kind in ("eagle3", "mtp") and not own else None
        overrides = gpu_memory(GPU_SHARE / (1 + len(self.candidates)))
        config = self._config(candidate)
        return Engine(self.policy_dir, drafter_dir, config=config, seed=0, alone=True, overrides=overrides)

    def _config(self, candidate: Candidate) -> Config:
        cuda, largest = torch.cuda.is_available(), max(self.options.batches)
        dtype = str(self.hf_config.get("dtype") or self.hf_config.get("torch_dtype"))
        tokens = largest * (self.max_length + 2 * max(self.options.ks))
        return Config.model_validate(
            {
                "name": "bench-drafter",
                "model": {
                    "source": str(self.policy_dir),
                    "dtype": dtype if dtype == "float32" else "bfloat16",
                    "max_length": self.max_length,
                },
                "sampling": {"max_response_tokens": self.options.max_tokens},
                "speculation": {
                    "method": candidate.kind,
                    "k": max(self.options.ks),
                    "adaptive": False,
                    "draft_model": candidate.folder if candidate.kind == "draft_model" else None,
                },
                "engine": {"max_num_seqs": largest, "kv_cache_gib": cache_gib(self.hf_config, tokens), "compile": cuda},
                "resources": {"gpus_per_rank": int(cuda), "ranks_per_node": 1},
            }
        )


def _part(found: Measurement, chosen: Sequence[bool]) -> Measurement:

    def of_round(parts: Sequence[Generation]) -> list[Generation]:
        return [part for part, is_chosen in zip(parts, chosen, strict=True) if is_chosen]

    return Measurement(found.variant, [of_round(parts) for parts in found.generations])


def cache_gib(hf_config: Mapping[str, Any], tokens: int) -> float:
    """Return the size of a KV cache on a CPU for so many tokens, in GiB, up to the largest that is taken."""
    heads = int(hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"])
    width = int(hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"])
    per_token = 4 * 2 * int(hf_config["num_hidden_layers"]) * heads * width
    return min(max(SPARE * tokens * per_token / 2**30, 0.125), LARGEST_CACHE_GIB)
