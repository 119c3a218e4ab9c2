"""Sequences of four tokens under speculation against the policy's exact distribution, by chi-squared tests.

A case is `NUM_SEQUENCES` responses with seeds of their own, against probabilities enumerated from the policy in FP64.
EAGLE-3 is tested at each setting alone, every other source with the settings mixed in each batch. False-alarm rate of
all tests of this file together: `FALSE_ALARMS`, divided among them (Bonferroni). A control that is wrong on purpose
must be rejected at the same level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY
from specrl.rollout.engine import Engine, Request, StoredText, response_seed
from specrl.rollout.errors import SamplerError
from specrl.rollout.requests import Generation
from specrl.rollout.sampling.gumbel import Picked
from specrl.rollout.sampling.verification import Sampling, Verified
from specrl.rollout.vllm.weights.load import read_weights
from tests.exactness.chi_squared import ChiSquared, chi_squared
from tests.exactness.conftest import Start
from tests.exactness.toy import drafter_weights, likely_tokens, llama_config, policy_weights

pytestmark = pytest.mark.engine
FALSE_ALARMS = 1e-4
LENGTH = 4
NUM_SEQUENCES = 20_000
NUM_CONTROL = 5_000
"""Enough to reject what is wrong on purpose."""
THRESHOLD = 0.2
PROMPT = likely_tokens()[:3] * 2
Setting = tuple[float, float]
SETTINGS: tuple[Setting, ...] = ((1.0, 1.0), (0.6, 1.0), (1.0, 0.9), (0.6, 0.9))
"""(temperature, top_p)."""
MIXED = ("ngram", "replay", "eagle3+replay", "draft_model")
P_VALUE = FALSE_ALARMS / (len(SETTINGS) + len(MIXED) + 1)
Tokens = tuple[int, ...]
Cell = tuple[Setting, Tokens]


@pytest.mark.parametrize("setting", SETTINGS)
def test_eagle3_samples_follow_the_policy(engine_of: Start, setting: Setting) -> None:
    generation, cells = sample(engine_of("eagle3"), (setting,), seed=7)
    stats = generation.stats
    assert stats.num_accepted_tokens > NUM_SEQUENCES
    if setting != (0.6, 0.9):  # which leaves this policy one choice after the first token
        assert stats.num_draft_tokens - stats.num_accepted_tokens > NUM_SEQUENCES / 100, "rejections are tested too"
    test = against_policy(cells, (setting,))
    assert test.p_value > P_VALUE, test


@pytest.mark.parametrize("method", MIXED)
def test_samples_of_every_other_source_follow_the_policy(engine_of: Start, method: str) -> None:
    engine = engine_of(method)
    engine.set_k(min(3, engine.longest_k))
    if engine.replays:
        likely = max(exact_distribution(0, SETTINGS[0]).items(), key=lambda item: item[1])[0]
        engine.set_replay([StoredText(PROMPT, likely)])
    generation, cells = sample(engine, SETTINGS, seed=8)
    source = REPLAY if "replay" in method else DRAFTER
    assert generation.stats.by_source[source].num_accepted_tokens > 500
    assert against_policy(cells, SETTINGS).p_value > P_VALUE


def test_samples_follow_the_policy_after_three_refits(engine_of: Start, directories: tuple[Path, Path]) -> None:
    engine = engine_of("eagle3")
    for version in (1, 2, 3):
        engine.refit(policy_weights(version).items(), drafter_weights(10 + version).items())
    _, cells = sample(engine, SETTINGS, seed=9)
    policy, drafter = directories
    engine.refit(read_weights(policy), load_file(drafter / "model.safetensors").items())
    assert against_policy(cells, SETTINGS, policy=3).p_value > P_VALUE
    assert against_policy(cells, SETTINGS, policy=2).p_value < P_VALUE


def test_typical_acceptance_is_rejected(engine_of: Start) -> None:
    """The positive control: drafts are accepted, and kept, wherever the policy finds them likely enough."""
    engine = engine_of("eagle3")
    with accepting_what_is_likely(engine):
        _, cells = sample(engine, SETTINGS[:1], seed=7, count=NUM_CONTROL)
    assert against_policy(cells, SETTINGS[:1]).p_value < P_VALUE


def test_an_engine_with_another_sampler_does_not_start(engine_of: Start) -> None:
    engine = engine_of("eagle3")
    sampling = engine.sampler.sampling
    one_further = sampling._replace(pick=lambda *arguments: sampling.pick(*arguments[:-1], arguments[-1] + 1))
    every_draft = sampling._replace(
        verify=lambda picked, drafts, *others: sampling.verify(drafts.roll(-1), drafts, *others)
    )
    for wrong in (one_further, every_draft):
        engine.sampler.sampling = wrong
        with pytest.raises(SamplerError, match="the sampler"):
            engine.self_test()
    engine.sampler.sampling = sampling
    engine.self_test()


@contextmanager
def accepting_what_is_likely(engine: Engine) -> Iterator[None]:
    """The engine accepts a draft where the policy gives it more than `THRESHOLD`; the rest is as it should be."""
    sampler, sampling = engine.sampler, engine.sampler.sampling
    probs: list[Tensor] = []

    def pick(logits: Tensor, *settings: Tensor) -> Picked:
        probs[:] = [logits.softmax(-1)]
        return sampling.pick(logits, *settings)

    def verify(picked: Tensor, drafts: Tensor, *others: Any) -> Verified:
        following = drafts.roll(-1).long()
        is_likely = probs[0].gather(1, following[:, None])[:, 0] > THRESHOLD
        return sampling.verify(torch.where(is_likely, following, picked), drafts, *others)

    sampler.sampling = Sampling(pick, verify)
    try:
        yield
    finally:
        sampler.sampling = sampling


def sample(
    engine: Engine, settings: Sequence[Setting], seed: int, count: int = NUM_SEQUENCES
) -> tuple[Generation, list[Cell]]:
    """`count` responses, the settings in turn, each with a seed of its own."""
    drawn = [settings[index % len(settings)] for index in range(count)]
    # The last token of a response is never drafted: one more than is looked at.
    requests = [Request(PROMPT, response_seed(seed, 0, 0, i), LENGTH + 1, *setting) for i, setting in enumerate(drawn)]
    generation = engine.generate(requests)
    responses = zip(drawn, generation.responses, strict=True)
    return generation, [(setting, tuple(response.tokens[:LENGTH])) for setting, response in responses]


def against_policy(cells: list[Cell], settings: Sequence[Setting], policy: int = 0) -> ChiSquared:
    exact = {
        (setting, tokens): probability / len(settings)
        for setting in settings
        for tokens, probability in exact_distribution(policy, setting).items()
    }
    return chi_squared(cells, exact)


@cache
def exact_distribution(policy: int, setting: Setting) -> dict[Tokens, float]:
    """Probabilities of all sequences of likely tokens, from transformers in FP64; the rest is missing to 1."""
    model, (temperature, top_p) = fp64_policy(policy), setting
    level: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = list(level)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits[:, -1]
        probs = nucleus(torch.softmax(logits / temperature, -1), top_p)[:, likely_tokens()].tolist()
        level = {
            (*prefix, token): level[prefix] * prob
            for prefix, row in zip(prefixes, probs, strict=True)
            for token, prob in zip(likely_tokens(), row, strict=True)
            if prob > 0
        }
    return level


@cache
def fp64_policy(policy: int) -> Any:
    model = LlamaForCausalLM(llama_config())
    model.load_state_dict(policy_weights(policy))
    return model.double().eval()


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """[rows, vocab] renormalised over the smallest sets of most probable tokens with mass `top_p`."""
    ordered, order = probs.sort(descending=True)
    kept = ordered.cumsum(-1) - ordered < top_p - 1e-12
    probs = torch.zeros_like(probs).scatter(-1, order, ordered * kept)
    return probs / probs.sum(-1, keepdim=True)
