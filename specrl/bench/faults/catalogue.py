"""The faults that `specrl bench faults` injects: failures that others report as silent, each with where they do.

A fault is given to a running `Trainer` and damages it from then on, in the place where the failure was reported: what a
refit sends, what the engine holds after it, its sampler, or the trainer's drafter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specrl.artifacts import write_json
from specrl.loop import Trainer
from specrl.rollout.vllm import sampler as sampling
from specrl.training.drafter.io import MAPPINGS

SHORT_POSITIONS = 16
"""The number of tokens after which the positions of a damaged drafter end."""
Named = list[tuple[str, Tensor]]
"""Tensors with their names on disk, as a refit sends them."""
Change = Callable[[Named, Named], tuple[Named, Named]]
"""A function of what a refit sends of policy and drafter that returns what arrives instead."""


@dataclass(frozen=True)
class Fault:
    """A failure that changes nothing that one would see at once."""

    name: str
    reported: str
    """Where others report it; empty for a failure that only specrl's own invariants make one."""
    inject: Callable[[Trainer], None] | None = None
    """Damages a trainer that has run a step; None for a fault that is there from the start."""
    damage_drafter: Callable[[Path], None] | None = None
    """Damages the folder of the drafter before the start; None for none."""
    needs_drafter: bool = False
    needs_fp8: bool = False
    """Whether it can happen only with FP8 in both engines and in the KV cache, which is then set."""


def _sent(change: Change) -> Callable[[Trainer], None]:
    """Return an injection that changes what each further refit sends, while the trainer keeps what is right."""

    def inject(trainer: Trainer) -> None:
        engine: Any = trainer.engine
        refit, refit_drafter = engine.refit, engine.refit_drafter

        def damaged(policy: Any, drafter: Any, version: int, kv_scales: Any = None) -> float:
            sent, draft = change(_copies(policy), _copies(drafter or ()))
            return float(refit(iter(sent), iter(draft) if drafter is not None else None, version, kv_scales))

        def damaged_drafter(drafter: Any) -> None:
            refit_drafter(iter(change([], _copies(drafter))[1]))

        engine.refit, engine.refit_drafter = damaged, damaged_drafter

    return inject


def _copies(weights: Any) -> Named:
    return [(name, tensor.clone()) for name, tensor in weights]


def _stale(*, of_drafter: bool) -> Callable[[Trainer], None]:
    """Return an injection by which the weights of the moment arrive in every further refit."""

    def inject(trainer: Trainer) -> None:
        assert trainer.drafter is not None or not of_drafter
        weights = trainer.drafter.named_weights() if of_drafter and trainer.drafter else trainer.policy.hf_weights()
        old = _copies(weights)
        _sent(lambda policy, drafter: (policy, old) if of_drafter else (old if policy else [], drafter))(trainer)

    return inject


def _swapped(policy: Named, drafter: Named) -> tuple[Named, Named]:
    """Exchange the MLPs' last matrices of the first two layers."""
    places = [index for index, (name, _) in enumerate(policy) if name.endswith("down_proj.weight")][:2]
    if len(places) == 2:
        first, second = places
        (a, x), (b, y) = policy[first], policy[second]
        policy[first], policy[second] = (a, y), (b, x)
    return policy, drafter


def _left_out(policy: Named, drafter: Named) -> tuple[Named, Named]:
    """Leave out the policy's last norm."""
    return [(name, tensor) for name, tensor in policy if name != "model.norm.weight"], drafter


def _zeroed(policy: Named, drafter: Named) -> tuple[Named, Named]:
    return policy, [(name, tensor if name in MAPPINGS else torch.zeros_like(tensor)) for name, tensor in drafter]


def _ids_as_offsets(policy: Named, drafter: Named) -> tuple[Named, Named]:
    """Write the targets' ids where loaders expect offsets, so that drafts mean other tokens."""
    return policy, [(name, tensor + torch.arange(len(tensor)) if name == "d2t" else tensor) for name, tensor in drafter]


def _ruin_training(trainer: Trainer) -> None:
    """Let training turn the drafter's output round, so that trainer and engine agree on a useless drafter."""
    assert trainer.drafter is not None
    state = trainer.drafter.state_dict()
    name = next(name for name in state if name.endswith("lm_head.weight"))
    state[name].neg_()


def _forget_kv_scales(trainer: Trainer) -> None:
    """Let every further refit leave the KV cache's scales at vLLM's own, 1."""
    engine: Any = trainer.engine
    refit = engine.refit

    def damaged(*arguments: Any, **named: Any) -> float:
        seconds = float(refit(*arguments, **named))
        for module in engine._vllm.policy.modules():
            for letter in "qkv":
                if hasattr(module, f"_{letter}_scale") and hasattr(module, f"_{letter}_scale_float"):
                    getattr(module, f"_{letter}_scale").fill_(1.0)
                    setattr(module, f"_{letter}_scale_float", 1.0)
        return seconds

    engine.refit = damaged


def _shorten_positions(drafter_dir: Path) -> None:
    """Let the drafter's configuration end its positions after 16 tokens."""
    path = drafter_dir / "config.json"
    values = json.loads(path.read_text())
    write_json(path, values | {"max_position_embeddings": SHORT_POSITIONS})


def _wrap_pick(change: Callable[..., Any]) -> Callable[[Trainer], None]:
    """Return an injection that puts `change(pick, *arguments)` in the place of the sampler's `pick`."""

    def inject(trainer: Trainer) -> None:
        names = vars(sampling)  # the sampler's module is that of this process alone
        names["pick"] = partial(change, names["pick"])

    return inject


def _hotter(pick: Any, logits: Tensor, temperature: Tensor, *others: Any) -> Any:
    return pick(logits, temperature * 2, *others)


def _unseeded(pick: Any, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> Any:
    return pick(logits, temperature, top_k, top_p, torch.rand_like(u))


def _accept_all(trainer: Trainer) -> None:
    """Let the sampler accept every draft, whatever the policy picks."""
    vars(sampling)["accepted_prefix"] = lambda drafted, *_: len(drafted)


CONTROL = "no fault"
"""The name of the training that nothing is injected into."""
FAULTS = (
    Fault(CONTROL, ""),
    Fault("stale policy", "TRL#5312", _stale(of_drafter=False)),
    Fault("two of the policy's tensors exchanged", "SkyRL#1680", _sent(_swapped)),
    Fault("one of the policy's tensors left out", "verl#7493", _sent(_left_out)),
    Fault("stale drafter", "vime#351", _stale(of_drafter=True), needs_drafter=True),
    Fault("drafter zeroed as after a sleep", "vllm#52479, miles#1926", _sent(_zeroed), needs_drafter=True),
    Fault("d2t as ids instead of offsets", "SpecForge, speculators", _sent(_ids_as_offsets), needs_drafter=True),
    Fault("drafter ruined by its training", "verl-SpeCo#53", _ruin_training, needs_drafter=True),
    Fault("positions of the drafter end early", "NeMo-RL#3960", damage_drafter=_shorten_positions, needs_drafter=True),
    Fault(
        "KV scales back at 1",
        "NeMo-RL#3225",
        _forget_kv_scales,
        needs_fp8=True,
    ),
    Fault("sampler twice as hot as asked", "", _wrap_pick(_hotter)),
    Fault("sampler that accepts every draft", "", _accept_all, needs_drafter=True),
    Fault("sampler without the requests' seeds", "", _wrap_pick(_unseeded)),
)
"""All faults, in the order in which they are injected; the first shows that a training without any is silent."""


def fault_named(name: str) -> Fault:
    """Return the fault of this name."""
    return next(fault for fault in FAULTS if fault.name == name)
