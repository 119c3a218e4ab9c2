"""Metric names are defined once, and the mismatch estimators estimate what they say."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specrl.metrics import METRICS, find_metric
from specrl.precision.mismatch import MismatchSums

SOURCES = Path(__file__).parents[2] / "specrl"
GROUPS = "|".join(sorted({name.partition("/")[0] for name in METRICS}))


def test_every_metric_name_in_the_sources_is_defined() -> None:
    used = {
        (path.name, name)
        for path in SOURCES.rglob("*.py")
        if path.name != "metrics.py"
        for name in re.findall(rf'"((?:{GROUPS})/[a-z0-9_]+)"', path.read_text())
    }
    assert used, "the pattern finds nothing: it no longer fits how names are written"
    assert {entry for entry in used if find_metric(entry[1]) is None} == set()


OF_A_STEP = ("timing", "performance", "spec", "bubble", "mismatch", "reward", "rollout", "policy", "drafter", "refit")
"""Groups that a step's record holds, see `tests/integration/test_bubbles.py`."""


def test_every_metric_outside_of_a_step_is_logged_by_some_stage() -> None:
    """A name counts where it stands in the sources as it is, or where an f-string assembles it from a name there."""
    whole: set[str] = set()
    beginnings: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        if path.name != "metrics.py":
            nodes = list(ast.walk(ast.parse(path.read_text())))
            strings = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values[:1]]
            beginnings |= {part.value for part in strings if isinstance(part, ast.Constant)}
            whole |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    missing = []
    for name in METRICS:
        group, _, leaf = name.partition("/")
        assembled = f"{group}/" in beginnings and leaf in whole
        if group not in OF_A_STEP and not (name in whole or name.removesuffix("I") in beginnings or assembled):
            missing.append(name)
    assert missing == []


def test_a_family_covers_its_positions_and_nothing_else() -> None:
    family = METRICS["spec/acceptance_rate_pos_I"]
    assert find_metric("spec/acceptance_rate_pos_3") is family
    assert find_metric("spec/acceptance_rate_pos_") is None
    assert find_metric("spec/acceptance_length_3") is None


def test_every_metric_says_what_it_counts() -> None:
    assert all(metric.description.endswith(".") and "/" in metric.name for metric in METRICS.values())


def test_equal_engines_do_not_disagree() -> None:
    logprobs = -torch.rand(1000) * 5
    metrics = MismatchSums.of(logprobs, logprobs).metrics()
    assert metrics == {
        "mismatch/token_mult_prob_error": 1.0,
        "mismatch/bulk_error": 1.0,
        "mismatch/kl": 0.0,
        "mismatch/js": 0.0,
        "mismatch/importance_ratio_max": 1.0,
        "mismatch/truncated_fraction": 0.0,
    }
    assert all(find_metric(name) for name in metrics)


def sampled(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two distributions over 50 tokens, and the log-probs (q, p) of tokens sampled from the second."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(50, generator=generator)
    p = torch.log_softmax(logits, 0)
    q = torch.log_softmax(logits + 0.4 * torch.randn(50, generator=generator), 0)
    tokens = torch.multinomial(p.exp(), num_tokens, replacement=True, generator=generator)
    return q[tokens], p[tokens], q, p


def test_kl_and_js_estimates_converge_to_the_exact_values() -> None:
    training, generation, q, p = sampled(400_000)
    middle = torch.log((p.exp() + q.exp()) / 2)
    exact_kl = float((p.exp() * (p - q)).sum())
    exact_js = float(0.5 * (p.exp() * (p - middle)).sum() + 0.5 * (q.exp() * (q - middle)).sum())
    assert MismatchSums.of(training, generation).kl == pytest.approx(exact_kl, rel=0.02)
    assert MismatchSums.of(training, generation).js == pytest.approx(exact_js, rel=0.02)


def test_no_sample_makes_the_divergence_estimates_negative() -> None:
    training, generation = -torch.rand(5000) * 20, -torch.rand(5000) * 20
    for token in range(0, 5000, 100):
        one = slice(token, token + 1)
        assert MismatchSums.of(training[one], generation[one]).kl >= 0
        assert MismatchSums.of(training[one], generation[one]).js >= 0


def test_ratios_are_training_over_generation() -> None:
    generation = torch.full((1000,), -2.0)
    training = generation + torch.tensor([3.0] * 5 + [-1.0] * 995)
    found = MismatchSums.of(training, generation)
    assert found.importance_ratio_max == pytest.approx(20.0855, rel=1e-4)
    assert MismatchSums.of(training[5:], generation[5:]).importance_ratio_max == pytest.approx(0.36788, rel=1e-4)
    assert found.truncated_fraction == pytest.approx(0.005)
    assert found.token_mult_prob_error == pytest.approx(0.005 * 20.0855 + 0.995 * 2.71828, rel=1e-4)


def test_the_bulk_of_the_tokens_is_without_the_largest_thousandth_and_one_at_least() -> None:
    for count, left_out in ((20, 1), (1000, 1), (4000, 4)):
        generation = torch.full((count,), -2.0)
        training = generation.clone()
        training[:left_out] += 6.0
        assert MismatchSums.of(training, generation).bulk_error == 1.0
        training[left_out] += 6.0
        assert MismatchSums.of(training, generation).bulk_error > 1.05
    assert MismatchSums.of(torch.tensor([-1.0]), torch.tensor([-2.0])).bulk_error == 1.0
    assert math.isnan(MismatchSums.of(torch.tensor([-1.0, math.nan, -1.0]), torch.full((3,), -2.0)).bulk_error)


def test_tokens_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(AssertionError, match="of the same tokens"):
        MismatchSums.of(torch.zeros(3), torch.zeros(4))
    assert MismatchSums.of(torch.zeros(0), torch.zeros(0)).metrics() == {}


def test_sums_of_shares_give_the_measures_of_all_tokens() -> None:
    """Ranks add up histograms instead of sending log-probs: the bulk is that of the sorted ratios."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.tensor([1e-7, 1e-3, 0.1, 2.0]).repeat(5000)
    log_r = (torch.randn(20_000, generator=generator) * scale).double()
    log_r[7] = 30.0
    shares = [MismatchSums.of(part, torch.zeros(len(part))) for part in log_r.split([1, 12_000, 7999])]
    found = shares[0] + shares[1] + shares[2] + MismatchSums.of([], [])
    assert found.importance_ratio_max == pytest.approx(math.exp(30.0))
    terms = log_r.abs().exp().sort().values
    assert found.token_mult_prob_error == pytest.approx(float(terms.mean()), rel=1e-12)
    assert found.bulk_error == pytest.approx(float(terms[:-20].mean()), rel=1e-4)
    assert found.truncated_fraction == float((log_r > math.log(2)).double().mean())
