"""`specrl bench drafter`: any drafters on a file of prompts, or a run's drafters over its RL steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specrl.bench.drafter.candidates import NGRAM_LOOKUP, NO_DRAFTS, Candidate, adopted, read_candidate
from specrl.bench.drafter.initial import cells_of, make_drafters
from specrl.bench.job import BenchJob, say
from specrl.bench.options import DrafterOptions, RunOptions
from specrl.bench.pages import titled
from specrl.bench.rollouts.engines import GPU_SHARE
from specrl.bench.rollouts.rounds import ACCEPTANCE, RATE, Variant, measure, rows_of, write_rounds
from specrl.bench.run import main as run
from specrl.config import Config
from specrl.data.files import read_requests
from specrl.data.problems import Prompt
from specrl.data.prompts import PromptSource
from specrl.distributed import join, leave
from specrl.models.checks.folder import check_directory
from specrl.models.sources import load_tokenizer
from specrl.rollout.engine import Engine, Request, response_seed, start_engine

PROMPT_TOKENS = 1024  # longer prompts lose their beginning
HOW = """
Policy `{options.model}`; {prompts} prompts from `{options.data}`, each answered up to its natural end or
{options.max_tokens} tokens. N-gram lookup is measured in the same rounds. Plain decoding is specrl's engine without
drafts. The acceptance length is 1 + accepted tokens per draft; the rate at a position is the accepted share of the
drafts that reach it. Drafts always have full length, even where shorter ones would be faster.
"""
TITLE = "Drafters on a file of prompts"
COLUMNS = titled("drafter", "kind", "layers") | {"trained with": "loss"} | titled("k", "temperature", "batch")
COLUMNS |= RATE | ACCEPTANCE | titled("notes")


def main(job: BenchJob, options: DrafterOptions) -> None:
    ranks = join()
    if job.run_dir is None:
        measure_file(job, options)
        leave()
    else:
        subject = job.subject
        drafters = make_drafters(subject, options, ranks, job.folder / "initial")
        leave()
        together = run.fitting(subject.config, most=3)
        run.main(job, RunOptions(cells_of(drafters), options.steps, 1, together, 0))


def measure_file(job: BenchJob, options: DrafterOptions) -> None:
    """Run all drafters at all temperatures and batch sizes, writing the rows and the page after each combination."""
    assert options.model is not None and options.data is not None
    given = [read_candidate(drafter, options.model) for drafter in options.drafters]
    drafters = [adopted(one, options.model, job.folder / str(index)) for index, one in enumerate(given)]
    config = config_of(options, NGRAM_LOOKUP)
    count = min(options.prompts, len(read_requests(options.data)))  # each prompt once
    prompts = PromptSource(config, load_tokenizer(options.model)).drafter_data(count)
    engines = {one: start(options, one, GPU_SHARE / (1 + len(drafters))) for one in (NGRAM_LOOKUP, *drafters)}
    variants = [Variant(NO_DRAFTS.facts, 0, engines[NGRAM_LOOKUP])]
    variants += [Variant(one.facts, k, engine) for one, engine in engines.items() for k in options.ks]
    how = HOW.format(options=options, prompts=len(prompts))
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        for temperature in options.temperatures:
            rounds = rounds_of_prompts(options, prompts, batch, temperature)
            found = rows_of(variants, measure(variants, rounds, batch), batch)
            rows += [row | {"temperature": temperature} for row in found]
            write_rounds(job, rows, TITLE, how, COLUMNS, options.repeats)
            words = ", ".join(f"{row['drafter']} k={row['k']} {row['speedup']:.2f}x" for row in found[1:])
            say(f"batch {batch}, temperature {temperature:g}: {words}")
    for engine in engines.values():
        engine.shutdown()


def rounds_of_prompts(
    options: DrafterOptions, prompts: Sequence[Prompt], batch: int, temperature: float
) -> list[list[Request]]:
    """Make rounds of all prompts, each with new seeds; prompts too few for a batch are repeated."""
    asked = [prompts[place % len(prompts)].tokens for place in range(max(batch, len(prompts)))]
    rest = options.max_tokens, temperature
    return [
        [Request(tokens, response_seed(0, turn, place, 0), *rest) for place, tokens in enumerate(asked)]
        for turn in range(options.repeats)
    ]


def start(options: DrafterOptions, candidate: Candidate, gpu_share: float) -> Engine:
    assert options.model is not None
    is_policy = candidate.folder is not None and candidate.folder.resolve() == options.model.resolve()
    drafter_dir = candidate.folder if candidate.kind in ("eagle3", "mtp") and not is_policy else None
    return start_engine(config_of(options, candidate), options.model, drafter_dir, gpu_share=gpu_share)


def config_of(options: DrafterOptions, candidate: Candidate) -> Config:
    assert options.model is not None
    hf_config, cuda = check_directory(options.model, max_length=1), torch.cuda.is_available()
    is_float32 = str(hf_config.get("dtype") or hf_config.get("torch_dtype")) == "float32"
    max_length = min(int(hf_config.get("max_position_embeddings", 2**20)), PROMPT_TOKENS + options.max_tokens)
    model = {"source": str(options.model), "dtype": "float32" if is_float32 else "bfloat16", "max_length": max_length}
    draft_model = candidate.folder if candidate.kind == "draft_model" else None
    speculation = {"method": candidate.kind, "k": max(options.ks), "adaptive": False, "draft_model": draft_model}
    return Config.model_validate(
        {
            "name": "bench-drafter",
            "model": model,
            "drafter": {"data": options.data},
            "sampling": {"max_response_tokens": options.max_tokens},
            "speculation": speculation,
            "engine": {"max_num_seqs": max(options.batches), "compile": cuda},
            "resources": {"gpus_per_rank": int(cuda), "ranks_per_node": 1},
        }
    )
