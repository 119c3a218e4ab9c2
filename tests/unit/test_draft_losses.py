"""The drafter's loss: value and gradient are those of the plain formula, and training uses it with its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specrl.config import ConfigError, parse_config
from specrl.config.algorithms import DRAFT_LOSSES
from tests.unit.test_drafter import HIDDEN, make_drafter, make_features, policy_logits, trained, unroll, write_policy

LOSS = DRAFT_LOSSES.function(DRAFT_LOSSES.default())


def formula(p: Tensor, q: Tensor) -> Tensor:
    return -(p * q.log()).sum(-1)


def distributions(scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(64, 37, generator=generator, dtype=torch.float64) * scale for _ in range(2))
    return logits.requires_grad_(), target.softmax(-1)


@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_loss_and_gradient_are_those_of_the_formula(scale: float) -> None:
    logits, target = distributions(scale)
    expected = formula(target, logits.softmax(-1))
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    given = logits.detach().clone(), target.clone()
    found = LOSS(*given)
    torch.testing.assert_close(found, (expected.detach(), gradient))
    assert torch.equal(given[0], logits) and torch.equal(given[1], target), "the arguments are not changed"


def test_an_unknown_loss_is_one_line_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="allowed: cross_entropy, or an import path"):
        parse_config({"name": "run", "drafter": {"loss": "kl"}})


def test_a_drafter_that_has_nothing_in_common_with_the_policy_has_finite_gradients() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0], [0.0, 200.0, 0.0]])
    target = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    loss, gradient = LOSS(logits, target)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert loss[1].abs() < 1e-3 and gradient[1].abs().max() < 1e-3
    assert loss[0] <= 200


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("position_decay", [0.8, 1.0])
def test_training_has_the_loss_and_the_weights_of_positions(policy_dir: Path, position_decay: float) -> None:
    drafter = make_drafter(policy_dir, position_decay=position_decay)
    features = make_features(drafter, [(2, 12), (4, 6)])
    in_vocab = torch.isin(features.target_top1, drafter.draft_tokens)
    expected = torch.zeros(())
    for step, logits in enumerate(unroll(drafter, features)):
        mask = features.mask
        places = [
            (row, c + step + 1)
            for row in range(2)
            for c in range(mask.shape[1] - step - 1)
            if mask[row, c : c + step + 2].all()
        ]
        rows, columns = (torch.tensor(part) for part in zip(*places, strict=True))
        logits_of_policy = policy_logits(features.hidden[rows, columns, -HIDDEN:])
        p, counted = logits_of_policy.softmax(-1), in_vocab[rows, columns]
        expected = expected + position_decay**step * formula(p, logits.softmax(-1))[counted].mean()
    loss, gradient, _ = trained(drafter, features)
    torch.testing.assert_close(loss, expected.detach())
    drafter._gradient.zero_()
    expected.backward()
    torch.testing.assert_close(gradient, drafter._gradient, rtol=1e-4, atol=1e-6)
