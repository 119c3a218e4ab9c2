"""The drafters that `specrl bench drafter --run` starts from: untrained, trained on general text, or on the task."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from specrl.artifacts import write_text
from specrl.bench.cells import Cell
from specrl.bench.job import Subject, say
from specrl.bench.options import DrafterOptions
from specrl.data.problems import derive_seed
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.models.sources import load_tokenizer
from specrl.rollout.collect import Origin, collect
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout
from specrl.training.batches import TokenSequence, pack
from specrl.training.drafter.drafters import new_drafter, pretrain
from specrl.training.megatron.policy import Policy

PLAIN = Cell("plain", ("speculation.method=none", "speculation.k=0", "bubbles.use=none"))

REQUESTS = ("Explain {}.", "Tell a story about {}.", "Give me three tips about {}.", "Write an e-mail about {}.")
TOPICS = ("the ocean", "electric cars", "bread", "chess", "jazz", "remote work", "bees", "the moon", "sleep", "opera")


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
        answers[name] = collect(engine, prompts, 1, config, None, origin).scored()[0]
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
