"""What the presets compute against TRL 1.16.0's formulas, written anew, on the same numbers.

They are `_compute_loss` and `_generate_and_score_completions` of trl/trainer/grpo_trainer.py and rloo_trainer.py. Where
specrl differs on purpose, the test says so, as does docs/guides/algorithms.md.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specrl.algorithms.advantages import group_advantages
from specrl.algorithms.objective import TokenTargets, policy_loss, response_weights
from specrl.config import TrainConfig

LENGTHS, LONGEST = (1, 5, 9, 12), 12
MASK = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
REWARDS = [1.0, 0.0, 0.5, 0.0, 2.0, 2.5, 0.0, 0.25]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
BETA = 0.05


def trl_loss(
    lp: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, kind: str, level: str, low: float, high: float
) -> Tensor:
    """With `use_bias_correction_kl=False`: by default TRL's penalty is k3 times the ratio (arXiv 2512.02556)."""
    log_ratio = lp - old
    if level == "sequence":
        log_ratio = ((log_ratio * MASK).sum(-1) / MASK.sum(-1)).unsqueeze(-1)
    ratio = log_ratio.exp()
    if kind == "cispo":
        per_token = -ratio.clamp(max=high).detach() * advantages * lp
    else:
        per_token = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    per_token = (per_token + BETA * ((reference - lp).exp() - (reference - lp) - 1)) * MASK
    if kind == "grpo":
        return (per_token.sum(-1) / MASK.sum(-1)).mean()
    return per_token.sum() / (MASK.size(0) * LONGEST if kind == "dr_grpo" else MASK.sum())


def trl_rloo_loss(lp: Tensor, old: Tensor, _: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = ((lp * MASK).sum(1) - (old * MASK).sum(1)).exp()
    gain = torch.min(ratio * advantages[:, 0], ratio.clamp(1 - low, 1 + high) * advantages[:, 0])
    return -gain.mean()


@pytest.mark.parametrize(
    ("preset", "trl", "spread"),
    [
        (None, ("dapo", "token", 0.2, 0.28), 0.4),
        ("dapo", ("dapo", "token", 0.2, 0.28), 0.4),
        ("dr-grpo", ("dr_grpo", "token", 0.2, 0.28), 0.4),
        ("gspo", ("grpo", "sequence", 3e-4, 4e-4), 1e-3),
        ("cispo", ("cispo", "token", 0.0, 1.28), 0.4),  # TRL's epsilon_high is the bound, ours is its distance from 1
        ("rloo", None, 0.0),  # later TRL clips one ratio for the whole response, specrl each token's
        ("reinforce++", ("dapo", "token", 0.2, 0.28), 0.4),
        ("gdpo", ("dapo", "token", 0.2, 0.28), 0.4),
    ],
)
def test_a_preset_has_trls_loss_and_gradient(preset: str | None, trl: tuple[Any, ...] | None, spread: float) -> None:
    """The mean of `rloo` is TRL's over the longest length, which is in the learning rate."""
    torch.manual_seed(0)
    old = -torch.rand(4, LONGEST, dtype=torch.float64) - 0.1
    lp = (old + spread * torch.randn_like(old)).requires_grad_()
    reference = old + 0.3 * torch.randn_like(old)
    advantages = torch.tensor([1.2, -0.7, 0.4, -0.9], dtype=torch.float64)[:, None].expand_as(old)
    wanted = (
        trl_loss(lp, old, reference, advantages, *trl)
        if trl
        else trl_rloo_loss(lp, old, reference, advantages, 0.2, 0.28)
    )
    chosen = {"updates_per_step": 2, "kl_coef": BETA if trl else 0.0, **({"algorithm": preset} if preset else {})}
    config = TrainConfig.model_validate(chosen)
    weights = response_weights(LENGTHS, config.loss_mean, LONGEST)
    factors = None if weights is None else torch.tensor(weights, dtype=torch.float64)[:, None]
    targets = TokenTargets(advantages, old, old, reference if trl else None, factors)
    total, metrics = policy_loss(lp, torch.zeros_like(old), MASK, targets, config)
    found = total / MASK.sum() * (1 if trl else LONGEST)
    if trl:
        assert 0 < metrics["clip_fraction"] < MASK.sum()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, lp, retain_graph=True)[0] for loss in (found, wanted)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("preset", "scale"), [("dapo", "group"), ("dr-grpo", "none"), ("reinforce++", "batch"), ("rloo", "rloo")]
)
def test_a_preset_has_trls_advantages_up_to_one_factor(preset: str, scale: str) -> None:
    """TRL divides by n - 1 in a deviation, and adds 1e-4 to it; its batch's has the differences between groups, too."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64).view(2, 4)
    centred = rewards - rewards.mean(1, keepdim=True)
    wanted, factor = {
        "none": (centred, 1.0),
        "group": (centred / (rewards.std(1, keepdim=True) + 1e-4), math.sqrt(4 / 3)),
        "batch": (centred / (rewards.std() + 1e-4), float(rewards.std() / centred.std(unbiased=False))),
        "rloo": (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3, 1.0),
    }[scale]
    advantage = TrainConfig.model_validate({"algorithm": preset}).advantage
    found = torch.tensor(group_advantages(REWARDS, GROUPS, advantage), dtype=torch.float64).view(2, 4)
    torch.testing.assert_close(found, factor * wanted, rtol=5e-4, atol=1e-12)
