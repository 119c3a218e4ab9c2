"""The process of one rank of the train stage, which takes one step at a time; see `Training`."""

from __future__ import annotations

import time
from itertools import count
from multiprocessing.connection import Connection
from threading import Thread

import torch

from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.processes import end_with_parent
from specrl.progress import Progress
from specrl.tracking.tracker import Tracker

WATCH_SECONDS = 0.02


def main(parent: Connection) -> None:
    """Build the train stage without MLflow and take the steps of its loop, each when the parent asks for it.

    Every answer but the first is the most memory, in GiB, that has been in use of this rank's GPU since; 0 on a CPU.
    """
    end_with_parent(parent.recv())
    from specrl.bench.acceptance import accepting_at  # slow; the parent may end meanwhile
    from specrl.stages import train

    context, acceptance = StageContext.load(parent.recv()), parent.recv()
    ranks, used = join(), [0.0]
    with Progress(context.stage_dir, enabled=False) as progress:
        trainer = train.build(context, ranks, Tracker())
        trainer.validation.best_metric = None  # a checkpoint of the best policy would count as time
        if acceptance is not None:
            sampler = trainer.engine.sampler
            sampler.sampling = accepting_at(acceptance, sampler, trainer.policy.hf_config.vocab_size)
        first_step = trainer.restore()
        trainer.refit_engine(version=first_step)
        if ranks.device.type == "cuda":  # not before CUDA graphs have been captured, which permit few calls beside them
            Thread(target=watch, args=(ranks.device, used), daemon=True).start()
        parent.send(None)
        for step in count(first_step):
            try:
                parent.recv()
            except EOFError:  # no more steps
                break
            trainer.step(step, progress)
            trainer.checkpoints.wait()  # or it would be written during another training's step
            parent.send(used[0])
        trainer.shutdown()
    leave()


def watch(device: torch.device, used: list[float]) -> None:
    """Keep `used[0]` at the most memory of the GPU that has been in use, by whatever process, in GiB."""
    while True:
        free, total = torch.cuda.mem_get_info(device)
        used[0] = max(used[0], (total - free) / 2**30)
        time.sleep(WATCH_SECONDS)
