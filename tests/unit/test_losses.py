from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from specrl.algorithms.losses import LossInputs
from specrl.algorithms.objective import TokenTargets, kl_estimates, policy_loss, response_weights
from specrl.config import TrainConfig
from specrl.config.algorithms import LOSSES
from specrl.config.training import KlEstimator, LossMean

MASK = torch.tensor([[True, True, False]])
ENTROPY = torch.tensor([[0.5, 1.5, 9.0]])


def targets(advantage: float, old: list[float] | None = None, generated: list[float] | None = None) -> TokenTargets:
    return TokenTargets(
        advantages=torch.full((1, 3), advantage),
        generation_logprobs=torch.tensor([generated or [-1.0, -1.0, -1.0]]),
        old_logprobs=None if old is None else torch.tensor([old]),
        reference_logprobs=None,
    )


def logprobs(*values: float) -> torch.Tensor:
    return torch.tensor([values], requires_grad=True)


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    lp = logprobs(-1.0, -1.0, -1.0)
    loss, _ = policy_loss(lp, ENTROPY, MASK, targets(2.0), TrainConfig())
    loss.backward()
    assert lp.grad is not None and lp.grad.tolist() == [[-2.0, -2.0, 0.0]]


def test_tokens_outside_the_mask_do_nothing() -> None:
    lp = logprobs(-1.0, -1.0, 50.0)
    _, metrics = policy_loss(lp, ENTROPY, MASK, targets(1.0), TrainConfig())
    assert metrics["entropy"].item() == 2.0


def test_a_loss_may_compute_what_is_no_number_outside_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """There all of its inputs are 0."""

    def own(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return inputs.advantages / inputs.logprobs, {"inverse": 1 / inputs.logprobs}

    monkeypatch.setattr(LOSSES, "function", lambda _: own)
    sampled = torch.tensor([-1.0, -2.0], requires_grad=True)
    rows = torch.zeros(MASK.shape).masked_scatter(MASK, sampled)
    loss, metrics = policy_loss(rows, ENTROPY, MASK, replace(targets(2.0), advantages=2.0 * MASK), TrainConfig())
    loss.backward()
    assert loss.isfinite() and metrics["inverse"].item() == -1.5
    assert sampled.grad is not None and sampled.grad.isfinite().all()


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"), [(1, 1.27, True), (1, 1.29, False), (-1, 0.79, False), (-1, 1.5, True)]
)
def test_clip_is_higher_above_than_below(advantage: float, ratio: float, moves: bool) -> None:
    lp = logprobs(-1.0 + math.log(ratio), -1.0, -1.0)
    loss, metrics = policy_loss(lp, ENTROPY, MASK, targets(advantage, old=[-1.0, -1.0, -1.0]), TrainConfig())
    loss.backward()
    assert lp.grad is not None
    assert (lp.grad[0, 0].item() != 0) == moves
    assert metrics["clip_fraction"].item() == (0 if moves else 1)


def test_importance_weight_is_truncated_and_carries_no_gradient() -> None:
    lp = logprobs(-1.0, -1.0, -1.0)
    loss, _ = policy_loss(lp, ENTROPY, MASK, targets(1.0, generated=[-5.0, -1.5, -1.0]), TrainConfig())
    loss.backward()
    assert lp.grad is not None
    assert lp.grad[0].tolist() == pytest.approx([-2.0, -math.exp(0.5), 0.0])


def test_kl_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    config = TrainConfig(kl_coef=0.5)
    for shift, positive in ((0.0, False), (0.3, True), (-0.3, True)):
        lp = logprobs(-1.0, -1.0, -1.0)
        base = targets(0.0)
        with_reference = TokenTargets(base.advantages, base.generation_logprobs, None, lp.detach() + shift)
        loss, metrics = policy_loss(lp, ENTROPY, MASK, with_reference, config)
        assert (metrics["kl"].item() > 0) == positive
        assert loss.item() == pytest.approx(0.5 * metrics["kl"].item())


@pytest.mark.parametrize("weighted", [False, True])
def test_the_bonus_is_the_entropy_of_the_response_tokens_by_the_mean_of_the_loss(weighted: bool) -> None:
    """Mutation: the entropy of what is outside of the mask, or a bonus that the mean of the loss does not weigh."""
    config, entropy = TrainConfig(entropy_coefficient=0.25), ENTROPY.clone().requires_grad_()
    base = replace(targets(0.0), weights=torch.full((1, 3), 3.0) if weighted else None)
    loss, metrics = policy_loss(logprobs(-1.0, -1.0, -1.0), entropy, MASK, base, config)
    loss.backward()
    scale = 3.0 if weighted else 1.0
    assert loss.item() == pytest.approx(-0.25 * (0.5 + 1.5) * scale)
    assert entropy.grad is not None and entropy.grad.tolist() == [[-0.25 * scale, -0.25 * scale, 0.0]]
    assert metrics["entropy"].item() == 2.0 and not metrics["entropy"].requires_grad


KL_ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


@pytest.mark.parametrize(("estimator", "expected"), zip(KL_ESTIMATORS, (0.3, 0.045, math.exp(-0.3) - 0.7), strict=True))
def test_a_penalty_is_the_sum_of_its_estimates(estimator: KlEstimator, expected: float) -> None:
    """For l = 0.3 and, at the second token, -0.3; k3 as in TRL: exp(ref - lp) - (ref - lp) - 1."""
    config = TrainConfig(kl_coef=0.5, kl_estimator=estimator)
    base, reference = targets(0.0), torch.tensor([[-1.3, -0.7, 5.0]])
    loss, metrics = policy_loss(
        logprobs(-1.0, -1.0, -1.0), ENTROPY, MASK, replace(base, reference_logprobs=reference), config
    )
    other = {"k1": -0.3, "k2": 0.045, "k3": math.exp(0.3) - 0.3 - 1}[estimator]
    assert metrics["kl"].item() == pytest.approx(expected + other, rel=1e-5, abs=1e-7)
    assert loss.item() == pytest.approx(0.5 * (expected + other), rel=1e-5, abs=1e-7)


def test_estimates_have_the_mean_and_the_gradient_that_they_are_said_to_have() -> None:
    """Over all tokens of a distribution; in the reward an estimate weighs the gradient of its token's log-prob."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.4, 0.7], dtype=torch.float64).log_softmax(0)
    lp = logits.log_softmax(0)
    divergence = (lp.exp() * (lp - reference)).sum()
    (true_gradient,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    means, gradients, in_reward = {}, {}, {}
    for estimator in KL_ESTIMATORS:
        values = kl_estimates(lp, reference, estimator)
        means[estimator] = float((lp.exp() * values).sum())
        sampled = (lp.exp().detach() * values).sum()
        weighted = (lp.exp().detach() * values.detach() * lp).sum()
        (gradients[estimator],) = torch.autograd.grad(sampled, logits, retain_graph=True)
        (in_reward[estimator],) = torch.autograd.grad(weighted, logits, retain_graph=True)
    assert means["k1"] == pytest.approx(float(divergence)) and means["k3"] == pytest.approx(float(divergence))
    torch.testing.assert_close(gradients["k1"], torch.zeros_like(true_gradient), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradients["k2"], true_gradient)
    torch.testing.assert_close(in_reward["k1"], true_gradient)
    assert not torch.allclose(gradients["k3"], true_gradient) and not torch.allclose(in_reward["k3"], true_gradient)


def test_the_correction_carries_no_gradient() -> None:
    lp = logprobs(-1.0, -1.0, -1.0)
    loss, _ = policy_loss(lp, ENTROPY, MASK, targets(1.0, generated=[-1.5, -1.0, -1.0]), TrainConfig())
    loss.backward()
    assert lp.grad is not None
    assert lp.grad[0].tolist() == pytest.approx([-math.exp(0.5), -1.0, 0.0])  # not the ratio's own gradient as well


def test_gspo_has_grpos_gradient_on_policy_and_clips_whole_responses() -> None:
    config = TrainConfig.model_validate({"loss": "gspo"})
    lp = logprobs(-1.0, -2.0, 50.0)
    loss, _ = policy_loss(lp, ENTROPY, MASK, targets(2.0, generated=[-1.0, -2.0, -1.0]), config)
    loss.backward()
    assert lp.grad is not None and lp.grad[0].tolist() == pytest.approx([-2.0, -2.0, 0.0])
    lp = logprobs(-0.9, -1.0, -1.0)  # the response's ratio is exp(0.05)
    loss, metrics = policy_loss(lp, ENTROPY, MASK, targets(1.0, old=[-1.0, -1.0, -1.0]), config)
    loss.backward()
    assert lp.grad is not None and lp.grad.tolist() == [[0.0, 0.0, 0.0]]
    assert metrics["clip_fraction"].item() == 2


OWN_LOSSES = [name for name, row in LOSSES._by_name.items() if row.function.__module__ == LossInputs.__module__]


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_advantages_may_differ_by_token_but_for_the_loss_that_is_refused_with_a_teacher(name: str) -> None:
    lp, differing = logprobs(-1.0, -2.0, 7.0), torch.tensor([[3.0, -1.0, 9.0]])
    loss, _ = LOSSES.function(LOSSES.choose(name))(LossInputs(lp, lp.detach(), differing, MASK))
    (loss * MASK).sum().backward()
    wanted = [-1.0, -1.0, 0.0] if name == "gspo" else [-3.0, 1.0, 0.0]
    assert lp.grad is not None and lp.grad[0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_loss_returns_the_metrics_that_it_names(name: str) -> None:
    chosen = LOSSES.choose(name)
    values = torch.zeros(1, 3)
    _, metrics = LOSSES.function(chosen)(LossInputs(values, values, values, MASK))
    assert tuple(metrics) == LOSSES.find(chosen.name).metrics


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_ratio_beyond_all_numbers_leaves_the_gradient_finite(name: str) -> None:
    """Mutation: `exp` of the log-ratio as it is, whose gradient behind the clip is infinity times 0."""
    config = TrainConfig.model_validate({"loss": name, "updates_per_step": 2})
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    inputs = LossInputs(logprobs, torch.full((1, 2), -101.0), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    loss, _ = LOSSES.function(config.loss)(inputs)
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_cispo_clips_the_weight_of_a_token_and_keeps_its_gradient() -> None:
    config = TrainConfig(loss=LOSSES.choose("cispo"), updates_per_step=2)
    lp = logprobs(-1.0 + math.log(1.5), -1.0 + math.log(0.5), -1.0)
    loss, metrics = policy_loss(lp, ENTROPY, MASK, targets(2.0, old=[-1.0, -1.0, -1.0]), config)
    loss.backward()
    assert lp.grad is not None and lp.grad[0].tolist() == pytest.approx([-2 * 1.28, -2 * 0.5, 0.0])
    assert metrics["clip_fraction"].item() == 1


@pytest.mark.parametrize(
    ("mean", "wanted"),
    [("token", [2 / 6] * 2), ("response", [2 / (3 * 1), 2 / (3 * 4)]), ("constant", [2 / (3 * 8)] * 2)],
)
def test_a_token_counts_as_the_mean_over_tokens_or_responses_says(mean: LossMean, wanted: list[float]) -> None:
    lengths = [1, 4, 1]
    weights = response_weights(lengths, mean, most_tokens=8)
    assert (weights is None) == (mean == "token")
    for weight, gradient in zip(weights or [1.0] * 3, wanted, strict=False):
        lp = logprobs(-1.0, -1.0, -1.0)
        rows = replace(targets(2.0), weights=torch.full((1, 3), weight))
        loss, _ = policy_loss(lp, ENTROPY, MASK, rows, TrainConfig())
        (loss / sum(lengths)).backward()
        assert lp.grad is not None and lp.grad[0, 0].item() == pytest.approx(-gradient)
