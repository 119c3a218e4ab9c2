"""Failures that others report as silent, each with where they do, and the process of one of them.

`python -m tests.integration.faults CONTEXT.json FAULT OUTPUT.json`: one rank trains a step as it should, then the fault
is injected, and the steps go on until something says so. If nothing does, the test of exactness of the stage `validate`
has the last word. A fault damages a running `Trainer` in the place where the failure was reported: what a refit sends,
what the engine holds after it, or the trainer's drafter.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specrl.artifacts import write_json
from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.events import read_events
from specrl.loop import Trainer
from specrl.progress import Progress
from specrl.stages import train
from specrl.stages.validate import check_exactness
from specrl.tracking.tracker import Tracker
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


def _sent(change: Change) -> Callable[[Trainer], None]:
    """Return an injection that changes what each further refit sends, while the trainer keeps what is right."""

    def inject(trainer: Trainer) -> None:
        engine: Any = trainer.engine
        refit, refit_drafter = engine.refit, engine.refit_drafter

        def damaged(policy: Any, drafter: Any, *, kv_scales: Any = None) -> None:
            sent, draft = change(_copies(policy), _copies(drafter or ()))
            refit(iter(sent), iter(draft) if drafter is not None else None, kv_scales=kv_scales)

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


def _shorten_positions(drafter_dir: Path) -> None:
    """Let the drafter's configuration end its positions after 16 tokens."""
    path = drafter_dir / "config.json"
    values = json.loads(path.read_text())
    write_json(path, values | {"max_position_embeddings": SHORT_POSITIONS})


CONTROL = "no fault"
"""The name of the training that nothing is injected into."""
FAULTS = (
    Fault(CONTROL, ""),
    Fault("stale policy", "TRL#5312", _stale(of_drafter=False)),
    Fault("two of the policy's tensors exchanged", "SkyRL#1680", _sent(_swapped)),
    Fault("one of the policy's tensors left out", "verl#7493", _sent(_left_out)),
    Fault("stale drafter", "vime#351", _stale(of_drafter=True)),
    Fault("drafter zeroed as after a sleep", "vllm#52479, miles#1926", _sent(_zeroed)),
    Fault("d2t as ids instead of offsets", "SpecForge, speculators", _sent(_ids_as_offsets)),
    Fault("drafter ruined by its training", "verl-SpeCo#53", _ruin_training),
    Fault("positions of the drafter end early", "NeMo-RL#3960", damage_drafter=_shorten_positions),
)
"""All faults, in the order in which they are injected; the first shows that a training without any is silent."""


ERRORS = (RuntimeError, ValueError, ArithmeticError, LookupError)
"""The errors by which training ends; a token beyond the vocabulary is a LookupError."""
HEALTHY_STEPS = 1
"""The number of steps before a fault is injected."""


@dataclass(frozen=True)
class Finding:
    """What was said of a fault."""

    noticed: bool
    after_steps: int
    """The number of steps that were completed with the fault before it was noticed."""
    message: str
    where: str
    """`start`, `train` or `validate`; empty if it went unnoticed."""


def run_one(context: StageContext, fault: Fault) -> Finding:
    """Inject the fault into the train stage of this context, and return what was said of it."""
    with Progress(context.stage_dir, enabled=False) as progress:
        try:
            trainer = train.build(context, join(), Tracker())
            trainer.restore()
            trainer.refit_engine(version=0)
        except ERRORS as error:
            if fault.damage_drafter is None:  # nothing is wrong yet: this is no word about the fault
                raise
            return _said(error, 0, "start")
        return train_with(trainer, fault, progress)


def train_with(trainer: Trainer, fault: Fault, progress: Progress) -> Finding:
    """Train the healthy steps, inject the fault and go on; return what was said of it."""
    num_steps = trainer.config.train.num_steps
    stage_dir = trainer.recorder.steps_dir.parent
    healthy = HEALTHY_STEPS if fault.damage_drafter is None else 0
    for step in range(healthy):
        trainer.step(step, progress)
    if fault.inject is not None:
        fault.inject(trainer)
    known = len(read_events(stage_dir))
    for step in range(healthy, num_steps):
        since = step - healthy
        try:
            trainer.step(step, progress)
        except ERRORS as error:
            return _said(error, since, "train")
        if events := [event for event in read_events(stage_dir)[known:] if event.kind == "drafter"]:
            return Finding(noticed=True, after_steps=since, message=events[0].text, where="train")
    return validate_with(trainer, progress, num_steps - healthy)


def validate_with(trainer: Trainer, progress: Progress, after_steps: int) -> Finding:
    """Run the test of exactness of `validate` on the damaged engine; return what it said."""
    config, engine = trainer.config, trainer.engine
    prompts = trainer.generator.source.held_out(config.validate_.num_prompts)
    try:
        check_exactness(engine, prompts, trainer.rewards, config, Tracker(), progress)
    except RuntimeError as error:
        return _said(error, after_steps, "validate")
    return Finding(noticed=False, after_steps=after_steps, message="", where="")


def _said(error: Exception, after_steps: int, where: str) -> Finding:
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return Finding(noticed=True, after_steps=after_steps, message=f"{type(error).__name__}: {first}", where=where)


if __name__ == "__main__":
    chosen = next(fault for fault in FAULTS if fault.name == sys.argv[2])
    write_json(Path(sys.argv[3]), asdict(run_one(StageContext.load(Path(sys.argv[1])), chosen)))
    leave()
    # A thread may still write a checkpoint, and Python's end beside a thread in C++ can be an abort.
    os._exit(0)
