"""`specrl bench drafter`: any drafters on a file of prompts, or a run's drafters over its RL steps.

The kind of a drafter is read from its folder. A run's drafters are untrained, trained on general text, or on the task.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from specrl.artifacts import write_text
from specrl.bench.cells import Cell
from specrl.bench.job import BenchJob, Subject, say
from specrl.bench.options import DrafterOptions, RunOptions
from specrl.bench.pages import titled
from specrl.bench.rollouts.engines import GPU_SHARE
from specrl.bench.rollouts.rounds import ACCEPTANCE, RATE, Variant, measure, rows_of, write_rounds
from specrl.bench.run import main as run
from specrl.config import Config, ConfigError
from specrl.data.files import read_requests
from specrl.data.problems import Prompt, derive_seed
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks, join, leave
from specrl.models.checks.folder import check_directory
from specrl.models.directory import read_model_config
from specrl.models.drafters import LOSS_KEY, SPECULATORS_KIND
from specrl.models.families import FAMILIES, num_mtp_layers
from specrl.models.sources import load_tokenizer
from specrl.rollout.collect import Origin, collect, deal
from specrl.rollout.engine import Engine, Request, response_seed, start_engine
from specrl.schemas import Rollout
from specrl.training.batches import TokenSequence, pack
from specrl.training.drafter.drafters import new_drafter, pretrain
from specrl.training.drafter.io import adopt_drafter
from specrl.training.megatron.policy import Policy

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
PLAIN = Cell("plain", ("speculation.method=none", "speculation.k=0", "bubbles.use=none"))
REQUESTS = ("Explain {}.", "Tell a story about {}.", "Give me three tips about {}.", "Write an e-mail about {}.")
TOPICS = ("the ocean", "electric cars", "bread", "chess", "jazz", "remote work", "bees", "the moon", "sleep", "opera")


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


@dataclass(frozen=True)
class Candidate:
    """What is measured: a drafter, n-gram lookup, or plain decoding."""

    name: str
    kind: str  # the draft method, or `plain`
    layers: int = 0
    loss: str | None = None  # the training loss, if the folder states it
    folder: Path | None = None
    notes: tuple[str, ...] = ()  # findings about the folder, as lines for the page

    @property
    def facts(self) -> dict[str, Any]:
        """The columns that describe the candidate."""
        return {name: getattr(self, name) for name in ("kind", "layers", "loss", "notes")} | {"drafter": self.name}


NGRAM_LOOKUP, NO_DRAFTS = Candidate("ngram", "ngram"), Candidate("plain", "plain")


def read_candidate(folder: Path, policy_dir: Path) -> Candidate:
    """Determine from a folder what kind of drafter it holds.

    EAGLE-3 drafters are read as published or in the `speculators` format. A model of the policy's own architecture
    drafts with its multi-token-prediction layer; any other known model serves as a draft model, if its vocabulary is
    the policy's.
    """
    config = read_model_config(folder)
    trained_with = config.get("speculators_model_type")
    names = [str(name) for name in config.get("architectures") or []]
    layers = config.get("transformer_layer_config", config).get("num_hidden_layers", 1)
    known = [family.architecture for family in FAMILIES.values()]
    is_eagle = "draft_vocab_size" in config or any("eagle3" in name.lower() for name in names)
    if trained_with == SPECULATORS_KIND or (not trained_with and is_eagle):
        kind = "eagle3"
    elif not trained_with and set(names) & set(known):
        is_policy = names == read_model_config(policy_dir).get("architectures") and num_mtp_layers(config)
        kind, layers = ("mtp", num_mtp_layers(config)) if is_policy else ("draft_model", layers)
    else:
        raise ConfigError(
            f"--drafter {folder}: {trained_with or ' '.join(names) or 'no architecture'} in its config.json is not a "
            f"drafter to measure; allowed: EAGLE-3 (as published or in speculators format), {', '.join(known)}"
        )
    return Candidate(str(folder), kind, int(layers), config.get(LOSS_KEY), folder)


def adopted(candidate: Candidate, policy_dir: Path, directory: Path) -> Candidate:
    """Convert an EAGLE-3 drafter of another layout into a new folder; vLLM may support what specrl does not."""
    if candidate.kind != "eagle3" or candidate.folder is None:
        return candidate
    try:
        notes = adopt_drafter(candidate.folder, policy_dir.absolute(), directory)
        return replace(candidate, folder=directory, notes=notes)
    except ValueError as error:
        return replace(candidate, notes=(f"it is loaded by vLLM as it is: {error}",))


def make_drafters(subject: Subject, options: DrafterOptions, ranks: Ranks, folder: Path) -> dict[str, Path]:
    """Make a drafter for each initialisation, trained on responses to equally many prompts; return the folders.

    The untrained drafter has the same draft vocabulary as the task's. General prompts come from `drafter.data`, or else
    are generic instructions.
    """
    config, policy_dir = subject.config, subject.first_policy_dir
    data = config.drafter.data or (write_instructions(folder),)
    config = config.updated(drafter={"data": data}, environment={"name": None})
    source = PromptSource(config, load_tokenizer(policy_dir), prompts_dir=subject.prompts_dir)
    engine = Engine(policy_dir, None, config=config, seed=config.seed, speculate=False)
    origin = Origin(derive_seed(config.seed, "initial drafters"), step=0)
    answers: dict[str, list[Rollout]] = {}
    for name in options.sources:
        prompts = (source.drafter_data if name == "general" else source.pretraining)(options.prompts)
        answers[name] = collect(engine, deal(prompts, 1, 0, 1), config, None, origin).scored()[0]
    engine.shutdown()
    policy = Policy(policy_dir, config.policy, dtype=config.model.dtype, ranks=ranks, seed=config.seed)
    settings, found = config.drafter, {}
    for name, rollouts in answers.items():
        made = new_drafter(config, policy_dir, rollouts, ranks)
        if name != "none":
            sequences = [TokenSequence.of(one.prompt_tokens, one.response_tokens, i) for i, one in enumerate(rollouts)]
            size, multiple = settings.tokens_per_micro_batch, policy.pad_multiple
            pretrain(policy, made, pack(sequences, size, multiple, counts_repeated=True), settings)
        found[name] = folder / name
        made.save(found[name], policy_version=0)
        say(f"drafter {name}: {sum(len(rollout.response_tokens) for rollout in rollouts)} tokens")
    return found


def write_instructions(folder: Path) -> Path:
    """Write general instructions, unrelated to any task, as a file for `drafter.data`."""
    texts = [request.format(topic) for request, topic in product(REQUESTS, TOPICS)]
    write_text(folder / "general.jsonl", "".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return folder / "general.jsonl"


def cells_of(drafters: dict[str, Path]) -> tuple[Cell, ...]:
    """The trainings: plain decoding, and each drafter frozen and trained online."""
    ways: dict[str, tuple[str, ...]] = {"frozen": ("drafter.online_lr=0",), "online": ()}
    made = product(drafters.items(), ways.items())
    own = (Cell(f"{name}, {way}", (f'drafter.source="{folder}"', *changes)) for (name, folder), (way, changes) in made)
    return PLAIN, *own
