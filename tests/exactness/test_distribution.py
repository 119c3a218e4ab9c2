"""Sequences of four tokens under speculation against the policy's exact distribution, by a chi-squared test.

False-alarm rate of each test: P_VALUE. The positive control, an acceptance rule that is wrong on purpose, must fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaForCausalLM

from specrl.rollout import vllm_patch
from specrl.rollout.engine import Engine, Request, response_seed
from specrl.rollout.self_test import SamplerError
from tests.exactness.engines import running
from tests.exactness.toy import (
    drafter_weights,
    likely_tokens,
    llama_config,
    policy_weights,
    toy_config,
    write_drafter,
    write_policy,
)

pytestmark = pytest.mark.engine
P_VALUE = 1e-4
LENGTH = 4
NUM_SEQUENCES = 20_000
MIN_EXPECTED = 8.0
"""Cells expected less often are pooled."""
PROMPT = likely_tokens()[:3] * 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("distribution")
    policy, drafter = (
        write_policy(root / "policy", policy_weights(0)),
        write_drafter(root / "drafter", drafter_weights(1)),
    )
    with running(policy, drafter, toy_config("eagle3", 3), max_num_seqs=256) as engine:
        yield engine


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9)])
def test_speculative_sequences_follow_the_policy(engine: Engine, temperature: float, top_p: float) -> None:
    counts, num_accepted = sample(engine, temperature, top_p)
    assert num_accepted > 1000
    assert p_value(counts, exact_distribution(temperature, top_p)) > P_VALUE


def test_a_wrong_acceptance_rule_is_rejected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_first(drafts: Sequence[int], picked: Sequence[int]) -> int:
        return min(1, len(drafts))

    monkeypatch.setattr(vllm_patch, "accepted_prefix", accept_first)
    counts, _ = sample(engine, 1.0, 1.0)
    assert p_value(counts, exact_distribution(1.0, 1.0)) < P_VALUE
    with pytest.raises(SamplerError):
        engine.self_test()


def test_the_engines_own_sampler_does_not_pass_the_self_test(engine: Engine) -> None:
    installed = engine._runner._sample
    del engine._runner._sample
    try:
        with pytest.raises(SamplerError, match="not starting"):
            engine.self_test()
    finally:
        engine._runner._sample = installed
    engine.self_test()


def sample(engine: Engine, temperature: float, top_p: float) -> tuple[Counter[tuple[int, ...]], int]:
    """Counts of the first LENGTH tokens of that many responses, and the number of accepted drafts."""
    seeds = [response_seed(7, 0, 0, index) for index in range(NUM_SEQUENCES)]
    generation = engine.generate([Request(PROMPT, seed, LENGTH, temperature, top_p) for seed in seeds])
    return Counter(tuple(response.tokens) for response in generation.responses), generation.stats.num_accepted_tokens


def exact_distribution(temperature: float, top_p: float) -> dict[tuple[int, ...], float]:
    """Probabilities of all sequences of likely tokens, from transformers in FP64; the rest is missing to 1."""
    model = LlamaForCausalLM(llama_config())
    model.load_state_dict(policy_weights(0))
    model.double().eval()
    level: dict[tuple[int, ...], float] = {(): 1.0}
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


def nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """[rows, vocab] renormalised over the smallest sets of most probable tokens with mass `top_p`."""
    ordered, order = probs.sort(descending=True)
    kept = ordered.cumsum(-1) - ordered < top_p - 1e-12
    probs = torch.zeros_like(probs).scatter(-1, order, ordered * kept)
    return probs / probs.sum(-1, keepdim=True)


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    total = counts.total()
    cells = [cell for cell, prob in exact.items() if prob * total >= MIN_EXPECTED]
    expected = np.array([exact[cell] * total for cell in cells])
    observed = np.array([counts[cell] for cell in cells], dtype=float)
    pooled = total - expected.sum()
    if pooled >= MIN_EXPECTED:
        expected, observed = np.append(expected, pooled), np.append(observed, total - observed.sum())
    elif total > observed.sum():
        expected, observed = expected[:-1], observed[:-1]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)
