"""The process of one fault: `python -m specrl.bench.faults.one_run CONTEXT.json FAULT OUTPUT.json PARENT`.

One rank trains a step as it should, then the fault is injected, and the steps go on until something says so. If
nothing does, the test of exactness of the stage `validate` has the last word.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from specrl.artifacts import PretrainResult, write_json
from specrl.bench.faults.catalogue import Fault, fault_named
from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.events import read_events
from specrl.loop import Trainer
from specrl.processes import end_with_parent
from specrl.progress import Progress
from specrl.stages import train
from specrl.stages.validate import check_exactness
from specrl.tracking import Silent

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
            trainer = train.build(context, join(), Silent())
            trainer.restore(context.input("pretrain", PretrainResult).rollouts_dir)
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
        check_exactness(engine, prompts, config, Silent(), progress)
    except RuntimeError as error:
        return _said(error, after_steps, "validate")
    return Finding(noticed=False, after_steps=after_steps, message="", where="")


def _said(error: Exception, after_steps: int, where: str) -> Finding:
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return Finding(noticed=True, after_steps=after_steps, message=f"{type(error).__name__}: {first}", where=where)


def main(context_path: Path, name: str, output: Path, parent: int) -> None:
    """Write what was said of one fault, and end with the parent process."""
    end_with_parent(parent)
    write_json(output, asdict(run_one(StageContext.load(context_path), fault_named(name))))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
