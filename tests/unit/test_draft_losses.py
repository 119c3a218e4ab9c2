"""The drafter's losses: values and gradients are those of the plain formulas, and training uses the chosen one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specrl.config import ConfigError, DrafterConfig, parse_config
from specrl.config.algorithms import DRAFT_LOSSES
from tests.unit.test_drafter import make_drafter, make_features, trained, unroll, write_policy


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def hybrid(p: Tensor, q: Tensor, decay: float) -> Tensor:
    weight = (-decay * overlap(p, q)).exp().detach()
    return weight * -(p * q.log()).sum(-1) + (1 - weight) * (1 - overlap(p, q))


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda p, q: -(p * q.log()).sum(-1),
    "lk_hybrid": lambda p, q: hybrid(p, q, 3.0),
}


def distributions(scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(64, 37, generator=generator, dtype=torch.float64) * scale for _ in range(2))
    return logits.requires_grad_(), target.softmax(-1)


@pytest.mark.parametrize("scale", [0.3, 4.0])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_are_those_of_the_formula(name: str, scale: float) -> None:
    logits, target = distributions(scale)
    expected = FORMULAS[name](target, logits.softmax(-1))
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    given = logits.detach().clone(), target.clone()
    found = DRAFT_LOSSES.function(DRAFT_LOSSES.choose(name))(*given)
    torch.testing.assert_close(found, (expected.detach(), gradient))
    assert torch.equal(given[0], logits) and torch.equal(given[1], target), "the arguments are not changed"


def test_the_losses_are_all_there_and_take_their_options() -> None:
    with pytest.raises(ConfigError, match=f"allowed: {', '.join(FORMULAS)}, or an import path"):
        parse_config({"name": "run", "drafter": {"loss": "kl"}})
    config = parse_config({"name": "run", "drafter": {"loss": {"name": "lk_hybrid", "decay": 1.0}}})
    logits, target = distributions(1.0)
    found, _ = DRAFT_LOSSES.function(config.drafter.loss)(logits.detach(), target)
    torch.testing.assert_close(found, hybrid(target, logits.softmax(-1), 1.0).detach())


@pytest.mark.parametrize("name", FORMULAS)
def test_a_drafter_that_has_nothing_in_common_with_the_policy_has_finite_gradients(name: str) -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0], [0.0, 200.0, 0.0]])
    target = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    loss, gradient = DRAFT_LOSSES.function(DRAFT_LOSSES.choose(name))(logits, target)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert loss[1].abs() < 1e-3 and gradient[1].abs().max() < 1e-3
    assert loss[0] <= 200


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("settings", [{"loss": "lk_hybrid"}, {"loss": "cross_entropy", "position_decay": 1}])
def test_training_has_the_chosen_loss_and_weights(policy_dir: Path, settings: dict[str, Any]) -> None:
    settings = DrafterConfig.model_validate(settings).model_dump()
    drafter = make_drafter(policy_dir, **settings)
    features = make_features(drafter, [(2, 12), (4, 6)])
    in_vocab = torch.isin(features.target_top1, drafter.draft_tokens)
    formula = FORMULAS[settings["loss"]["name"]]
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
        p, counted = features.targets[rows, columns].softmax(-1), in_vocab[rows, columns]
        expected = expected + settings["position_decay"] ** step * formula(p, logits.softmax(-1))[counted].mean()
    loss, gradient, _ = trained(drafter, features)
    torch.testing.assert_close(loss, expected.detach())
    drafter._gradient.zero_()
    expected.backward()
    torch.testing.assert_close(gradient, drafter._gradient, rtol=1e-4, atol=1e-6)
