"""Record a run's policy and drafter once, so that any setting of the drafting control can be replayed without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specrl.bench.control.fixed import FixedLengths
from specrl.bench.control.recording import RecordedIteration, RecordedResponse, RecordedText, Recording
from specrl.bench.subject import Subject
from specrl.config import Config
from specrl.data.problems import derive_seed
from specrl.data.prompts import PromptSource
from specrl.models.sources import load_tokenizer
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.drafts.acceptance import accepted_prefix
from specrl.rollout.drafts.estimates import DraftLengths
from specrl.rollout.engine import Engine, Request, start_engine
from specrl.rollout.vllm.drafting.recorder import DraftObserver

LONGEST_DRAFT, LONGEST_REPLAY = 5, 16
"""The longest drafts that are recorded and timed, in tokens: of the drafter and from text; see `longest_draft`."""
NUM_PROMPTS, SAMPLES_PER_PROMPT = 16, 3
"""The number of held-out prompts, and of recorded responses to each; as many others are stored text."""
TIMED_REQUESTS = 24
"""The number of requests that are running when timing begins; they end one after another."""
TIMED_LENGTHS = (
    DraftLengths(0, 0),
    DraftLengths(3, 0),
    DraftLengths(0, 16),
    DraftLengths(1, 0),
    DraftLengths(5, 0),
    DraftLengths(0, 4),
    DraftLengths(3, 16),
)
"""The draft lengths at which iterations are timed; the last one is not fitted but checks the fit."""


def record(subject: Subject) -> Recording:
    """Generate responses to held-out prompts with the run's policy, and record all that a replay needs.

    Raises:
        ValueError: The run has no drafter.
    """
    if subject.drafter_dir is None or subject.first_drafter_dir is None:
        raise ValueError("bench control replays drafts of an EAGLE-3 drafter; this run has none")
    longest = longest_draft(subject.config)
    engine = start_engine(engine_config(subject.config, longest), subject.policy_dir, subject.drafter_dir)
    tokenizer, problems_dir = load_tokenizer(subject.policy_dir), subject.config.problems_dir
    prompts = PromptSource(subject.config, tokenizer, problems_dir=problems_dir).held_out(NUM_PROMPTS)
    origin = Origin(derive_seed(subject.config.seed, "bench control"), step=0)
    indices = [(index, sample) for index in range(len(prompts)) for sample in range(2 * SAMPLES_PER_PROMPT)]
    made = [(index, sample, make_request(prompts[index], sample, subject.config, origin)) for index, sample in indices]
    own = [(index, request) for index, sample, request in made if sample < SAMPLES_PER_PROMPT]
    other = [(index, request) for index, sample, request in made if sample >= SAMPLES_PER_PROMPT]
    responses = observed_responses(engine, own, subject.first_drafter_dir, subject.drafter_dir, longest)
    others = stored_texts(engine, other, longest)
    iterations = timed_iterations(engine, [request for _, request in own], others, prompts_of(own), longest)
    step_back = interpolated(subject.policy_dir, subject.first_policy_dir, 1 / subject.config.train.num_steps)
    engine.refit(step_back, None, version=1)
    earlier = stored_texts(engine, own, longest)
    engine.shutdown()
    tokens = [list(prompt.tokens) for prompt in prompts]
    threads, parallel = torch.get_num_threads(), subject.config.drafter.parallel
    return Recording(longest, threads, tokens, responses, earlier, others, iterations, parallel)


def longest_draft(config: Config) -> int:
    """Return the length of the drafter's drafts to record, in tokens: a parallel one never learns later positions."""
    return min(LONGEST_DRAFT, config.drafter.ttt_steps) if config.drafter.parallel else LONGEST_DRAFT


def engine_config(config: Config, longest: int) -> Config:
    """Return the run's configuration with drafts from all sources, of up to `longest` tokens from the drafter."""
    changes = {"method": "eagle3+replay", "k": longest, "replay_k": LONGEST_REPLAY}
    return config.model_copy(update={"speculation": config.speculation.model_copy(update=changes)})


def observed_responses(
    engine: Engine, own: Sequence[tuple[int, Request]], before: Path, after: Path, longest: int
) -> list[RecordedResponse]:
    """Answer the requests twice, and record what the drafter before and the drafter after RL propose on the way."""
    requests = [request for _, request in own]
    observed: list[tuple[list[list[int]], DraftObserver]] = []
    for directory in (before, after):
        print(f"drafts of {directory}", flush=True)
        engine.refit_drafter(tensors(directory).items())
        with engine.observe_drafts(longest) as observer:
            observed.append(([response.tokens for response in engine.generate(requests).responses], observer))
    (earlier, observer_before), (rows, observer_after) = observed
    return [
        RecordedResponse(
            prompt,
            request.seed,
            tokens,
            fates(tokens, observer_after.drafts[request.seed]),
            fates(same, observer_before.drafts[request.seed]),
            told(tokens, observer_after.confidences[request.seed], longest),
            told(same, observer_before.confidences[request.seed], longest),
        )
        for (prompt, request), tokens, same in zip(own, rows, earlier, strict=True)
        if tokens == same  # near-ties in BF16 may make the two differ
    ]


def fates(tokens: Sequence[int], drafts: Mapping[int, list[int]]) -> list[int]:
    """Return, for each token of a response, how many tokens of the draft made after it are the response's own."""
    return [accepted_prefix(drafts.get(count, []), tokens[count:]) for count in range(1, len(tokens) + 1)]


def told(tokens: Sequence[int], confidences: Mapping[int, list[float]], longest: int) -> list[list[float]]:
    """Return, for each token of a response, the drafter's confidence in each token of the draft made after it."""
    return [confidences.get(count, [0.0] * longest) for count in range(1, len(tokens) + 1)]


def stored_texts(engine: Engine, requests: Sequence[tuple[int, Request]], longest: int) -> list[RecordedText]:
    """Answer requests, given with the index of their prompt, and return the responses as text to store."""
    print(f"text of {len(requests)} responses", flush=True)
    engine.set_replay({})
    engine.set_k(min(3, longest))
    responses = engine.generate([request for _, request in requests]).responses
    return [
        RecordedText(prompt, request.seed, response.tokens)
        for (prompt, request), response in zip(requests, responses, strict=True)
    ]


def prompts_of(requests: Sequence[tuple[int, Request]]) -> dict[int, tuple[int, ...]]:
    """Return the tokens of each prompt by its index."""
    return {index: tuple(request.prompt_tokens) for index, request in requests}


def timed_iterations(
    engine: Engine,
    requests: Sequence[Request],
    stored: Sequence[RecordedText],
    prompts: Mapping[int, tuple[int, ...]],
    longest: int,
) -> list[list[RecordedIteration]]:
    """Time the same generation at each of `TIMED_LENGTHS` in turn, from a full batch down to the last request.

    Args:
        longest: The most tokens of a draft of the drafter; longer ones are timed at this length.
    """
    texts: dict[tuple[int, ...], list[list[int]]] = {}
    for text in stored:
        texts.setdefault(prompts[text.prompt], []).append(text.tokens)
    engine.set_replay(texts)
    engine.set_k(None)
    found = []
    for lengths in dict.fromkeys(item._replace(k=min(item.k, longest)) for item in TIMED_LENGTHS):
        print(f"times with drafts of {lengths.k} + {lengths.replay_k} tokens", flush=True)
        controller = FixedLengths(lengths)
        engine.control_with(controller)
        engine.generate(list(requests[:: len(requests) // TIMED_REQUESTS]))
        found.append(controller.iterations)
    return found


def interpolated(directory: Path, other: Path, weight: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a policy, moved towards another one's by the share `weight` of the difference."""
    theirs = tensors(other)
    for name, tensor in tensors(directory).items():
        yield name, torch.lerp(tensor.float(), theirs[name].float(), weight).to(tensor.dtype)


def tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory's safetensors files, by name."""
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
