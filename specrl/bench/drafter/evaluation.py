"""Drafters on a file of prompts: acceptance, and the speed of generation with and without them, in matched rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specrl.bench.drafter.candidates import NGRAM, NGRAM_LOOKUP, NO_DRAFTS, PLAIN, Candidate, adopted, read_candidate
from specrl.bench.drafter.questions import Question, QuestionFile
from specrl.bench.job import say
from specrl.bench.rollouts.rounds import orders
from specrl.bench.settings import DrafterSettings
from specrl.bench.tables import Spread, ratios
from specrl.config import Config, ConfigError
from specrl.models.directory import check_directory
from specrl.models.sources import load_tokenizer
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.drafts.outcome_log import VerifiedDraft, by_length, counters
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.vllm.engine.arguments import gpu_memory

GPU_SHARE = 0.85
"""The share of a GPU's memory that all engines have together."""
LARGEST_CACHE_GIB = 4.0
"""The largest KV cache of an engine on a CPU; requests that do not fit wait for others."""
SPARE = 1.25
"""How much larger a KV cache on a CPU is than its requests, for blocks that are not full."""


@dataclass(frozen=True)
class Batch:
    """Requests of one category that run at the same time."""

    category: str
    requests: list[Request]


@dataclass(frozen=True)
class Variant:
    """A candidate in its engine, with the length of its drafts; `k = 0` is plain decoding."""

    candidate: Candidate
    engine: Engine
    k: int

    def run(self, batches: Sequence[Batch]) -> Round:
        """Generate the batches one after another, with no prompt cached."""
        found = Round()
        self.engine.set_k(self.k)
        self.engine.reset_prefix_cache()
        with self.engine.log_drafts() as log:
            for batch in batches:
                generation = self.engine.generate(batch.requests)
                found.parts.append(Part(batch.category, generation.num_tokens, generation.seconds))
                for request, response in zip(batch.requests, generation.responses, strict=True):
                    found.responses[request.seed] = response.tokens
                    found.categories[request.seed] = batch.category
        found.drafts = log.drafts
        return found


@dataclass(frozen=True)
class Part:
    """The tokens and the seconds of one batch."""

    category: str
    tokens: int
    seconds: float


@dataclass
class Round:
    """What one variant did in one round. Requests are told apart by their seeds."""

    parts: list[Part] = field(default_factory=list)
    drafts: list[VerifiedDraft] = field(default_factory=list)
    responses: dict[int, list[int]] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)

    def rate(self, category: str | None = None) -> float:
        """Return the tokens per second, of all requests or of those of one category."""
        parts = [part for part in self.parts if category in (None, part.category)]
        return sum(part.tokens for part in parts) / sum(part.seconds for part in parts)


@dataclass(frozen=True)
class Cell:
    """One variant at one temperature and batch size, with plain decoding and n-gram lookup in the same rounds."""

    variant: Variant
    temperature: float
    batch: int
    rounds: list[Round]
    plain: list[Round]
    ngram: list[Round]
    """The rounds of n-gram lookup with drafts of the same length; for plain decoding its own."""

    @property
    def drafts(self) -> list[VerifiedDraft]:
        """All drafts of all rounds."""
        return [draft for done in self.rounds for draft in done.drafts]

    @property
    def stats(self) -> SpeculationStats:
        """Their counters."""
        return counters(self.drafts)

    @property
    def speedup(self) -> Spread:
        """The ratio to plain decoding."""
        return self.speedup_of(None)

    @property
    def over_ngram(self) -> Spread:
        """The ratio to n-gram lookup."""
        return ratios([done.rate() for done in self.rounds], [done.rate() for done in self.ngram])

    @property
    def rate(self) -> float:
        """The median tokens per second."""
        return median(done.rate() for done in self.rounds)

    @property
    def equal(self) -> float:
        """The share of responses that are those of plain decoding, token for token."""
        pairs = [
            (tokens, slow.responses[seed])
            for done, slow in zip(self.rounds, self.plain, strict=True)
            for seed, tokens in done.responses.items()
        ]
        return sum(mine == plain for mine, plain in pairs) / len(pairs)

    @property
    def categories(self) -> list[str]:
        """The categories of the prompts."""
        return sorted(set(self.rounds[0].categories.values()))

    def speedup_of(self, category: str | None) -> Spread:
        """Return the ratio to plain decoding for one category, or for all."""
        return ratios([done.rate(category) for done in self.rounds], [done.rate(category) for done in self.plain])

    def stats_of(self, category: str) -> SpeculationStats:
        """Return the counters of the drafts of one category."""
        return counters(
            draft for done in self.rounds for draft in done.drafts if done.categories[draft.seed] == category
        )

    def by_response(self) -> dict[tuple[int, int], SpeculationStats]:
        """Return the counters by the length of the response."""
        lengths = {seed: len(tokens) for done in self.rounds for seed, tokens in done.responses.items()}
        return by_length(self.drafts, lambda draft: lengths[draft.seed])

    def by_context(self) -> dict[tuple[int, int], SpeculationStats]:
        """Return the counters by the number of tokens before the draft."""
        return by_length(self.drafts, lambda draft: draft.context)

    def row(self) -> dict[str, Any]:
        """Return the figures as a row for `--json`."""
        candidate = self.variant.candidate
        return {
            "drafter": candidate.name,
            "kind": candidate.kind,
            "layers": candidate.layers,
            "loss": candidate.loss,
            "k": self.variant.k,
            "temperature": self.temperature,
            "batch": self.batch,
            **_acceptance(self.stats),
            "speedup": self.speedup.median,
            "speedup_min": self.speedup.least,
            "speedup_max": self.speedup.greatest,
            "speedup_over_ngram": self.over_ngram.median,
            "tokens_per_s": self.rate,
            "responses_equal": self.equal,
            "by_category": {
                name: _acceptance(self.stats_of(name)) | {"speedup": self.speedup_of(name).median}
                for name in self.categories
            },
            "by_response_tokens": _by_range(self.by_response()),
            "by_context_tokens": _by_range(self.by_context()),
        }


def _acceptance(stats: SpeculationStats) -> dict[str, Any]:
    return {
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
    }


def _by_range(found: Mapping[tuple[int, int], SpeculationStats]) -> dict[str, Any]:
    return {
        f"{first}-{last}": _acceptance(stats) | {"drafts": stats.num_drafts} for (first, last), stats in found.items()
    }


class Evaluation:
    """The policy, the questions, and an engine for n-gram lookup and one for each drafter."""

    def __init__(self, settings: DrafterSettings, folder: Path) -> None:
        """Read the questions and start the engines.

        Args:
            folder: The folder for drafters in the layout that the engine loads.

        Raises:
            ConfigError: A folder or the file cannot be used.
        """
        assert settings.model is not None and settings.data is not None
        self.settings, self.policy_dir = settings, settings.model
        self.hf_config = check_directory(settings.model, max_length=1)
        positions = int(self.hf_config.get("max_position_embeddings", 2**20))
        if settings.max_tokens >= positions:
            raise ConfigError(f"--max-tokens {settings.max_tokens}: the policy has {positions} positions; ask for less")
        file = QuestionFile(settings.data, settings.prompt_column, settings.category_column, settings.template)
        tokenizer = load_tokenizer(settings.model)
        self.questions, self.too_long = file.read(tokenizer, positions - settings.max_tokens, settings.prompts)
        self.max_length = max(len(question.tokens) for question in self.questions) + settings.max_tokens
        found = [read_candidate(drafter, settings.model) for drafter in settings.drafter]
        self.candidates = [adopted(one, settings.model, folder / str(index)) for index, one in enumerate(found)]
        lookup = self._engine(NGRAM_LOOKUP)
        engines = [(candidate, self._engine(candidate)) for candidate in self.candidates]
        drafting = [(NGRAM_LOOKUP, lookup), *engines]
        self.variants = [
            Variant(NO_DRAFTS, lookup, 0),
            *(Variant(candidate, engine, k) for candidate, engine in drafting for k in settings.ks),
        ]

    def measure(self) -> list[Cell]:
        """Run all variants at all temperatures and batch sizes, after a batch of each that is not counted."""
        cells = []
        for batch in self.settings.batches:
            for variant in self.variants:
                variant.run(self.batches(batch, self.settings.temperatures[-1], turn=0)[:1])
            for temperature in self.settings.temperatures:
                found = self._measure(batch, temperature)
                cells += found
                words = ", ".join(
                    f"{cell.variant.candidate.name} k={cell.variant.k} {cell.speedup.median:.2f}x "
                    f"(acceptance length {cell.stats.acceptance_length:.2f})"
                    for cell in found[1:]
                )
                say(f"batch {batch}, temperature {temperature:g}: plain {found[0].rate:.0f} tokens/s; {words}")
        return cells

    def shutdown(self) -> None:
        """Stop all engines."""
        for engine in {id(variant.engine): variant.engine for variant in self.variants}.values():
            engine.shutdown()

    def _measure(self, batch: int, temperature: float) -> list[Cell]:
        """Run each variant once in each round on the same requests, in an order that changes from round to round."""
        rounds: list[list[Round]] = [[] for _ in self.variants]
        for turn, order in enumerate(orders(len(self.variants), self.settings.repeats)):
            work = self.batches(batch, temperature, turn)
            for index in order:
                rounds[index].append(self.variants[index].run(work))
        names = [(variant.candidate.name, variant.k) for variant in self.variants]
        plain = rounds[names.index((PLAIN, 0))]
        lookups = {k: rounds[names.index((NGRAM, k))] for k in self.settings.ks} | {0: plain}
        return [
            Cell(variant, temperature, batch, done, plain, lookups[variant.k])
            for variant, done in zip(self.variants, rounds, strict=True)
        ]

    def batches(self, batch: int, temperature: float, turn: int) -> list[Batch]:
        """Return the requests of a round in batches of one category; with too few questions some are asked again.

        Args:
            turn: The number of the round, in each of which the responses have other seeds.
        """
        by_category: dict[str, list[Question]] = {}
        for question in self.questions:
            by_category.setdefault(question.category, []).append(question)
        found = []
        for category, questions in by_category.items():
            for start in range(0, len(questions), batch):
                places = range(start, start + batch)
                found.append(Batch(category, [self._request(questions, place, temperature, turn) for place in places]))
        return found

    def _request(self, questions: Sequence[Question], place: int, temperature: float, turn: int) -> Request:
        question = questions[place % len(questions)]
        seed = response_seed(0, turn, question.id, place // len(questions))
        return Request(question.tokens, seed, self.settings.max_tokens, temperature)

    def _engine(self, candidate: Candidate) -> Engine:
        own = candidate.folder is not None and candidate.folder.resolve() == self.policy_dir.resolve()
        drafter_dir = candidate.folder if candidate.kind in ("eagle3", "mtp") and not own else None
        overrides = gpu_memory(GPU_SHARE / (1 + len(self.candidates)))
        config = self._config(candidate)
        return Engine(self.policy_dir, drafter_dir, config=config, seed=0, alone=True, overrides=overrides)

    def _config(self, candidate: Candidate) -> Config:
        cuda, largest = torch.cuda.is_available(), max(self.settings.batches)
        dtype = str(self.hf_config.get("dtype") or self.hf_config.get("torch_dtype"))
        return Config.model_validate(
            {
                "name": "bench-drafter",
                "model": {
                    "source": str(self.policy_dir),
                    "dtype": dtype if dtype == "float32" else "bfloat16",
                    "max_length": self.max_length,
                },
                "sampling": {"max_response_tokens": self.settings.max_tokens},
                "speculation": {
                    "method": candidate.kind,
                    "k": max(self.settings.ks),
                    "adaptive": False,
                    "draft_model": candidate.folder if candidate.kind == "draft_model" else None,
                },
                "engine": {
                    "max_num_seqs": largest,
                    "kv_cache_gib": cache_gib(self.hf_config, largest * (self.max_length + 2 * max(self.settings.ks))),
                    "compile": cuda,
                },
                "resources": {"gpus_per_rank": int(cuda), "ranks_per_node": 1},
            }
        )


def cache_gib(hf_config: Mapping[str, Any], tokens: int) -> float:
    """Return the size of a KV cache on a CPU for so many tokens, in GiB, up to the largest that is taken."""
    heads = int(hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"])
    width = int(hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"])
    per_token = 4 * 2 * int(hf_config["num_hidden_layers"]) * heads * width
    return min(max(SPARE * tokens * per_token / 2**30, 0.125), LARGEST_CACHE_GIB)
