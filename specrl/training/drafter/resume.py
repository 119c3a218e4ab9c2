"""Checkpoints within the drafter's pretraining, from which another job continues exactly."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specrl.artifacts import digest
from specrl.distributed import Ranks
from specrl.lifetime import LeftJobError, Lifetime
from specrl.models.hf_io import write_tensors
from specrl.training.batches import MicroBatch

SAVE_SECONDS = 300.0
"""The seconds from one checkpoint to the next; a kill loses at most this much."""
PREFIX = "progress/"

logger = logging.getLogger(__name__)


@dataclass
class TrainingProgress:
    """The number of completed steps, and their contribution to the last epoch's metrics, on one rank."""

    done: int
    loss: Tensor
    """float64 `[]`: this rank's part of the sum of the losses."""
    sums: Tensor
    """float64 `[steps + 1, 3]`: this rank's part of what `metrics_from_sums` reads."""
    norms: list[float]
    """The norm of each gradient, which is the same on all ranks."""


class TrainingCheckpoints:
    """Writes the drafter and its optimizer between two steps, where the ranks can leave their job.

    All ranks call every method marked as collective.
    """

    def __init__(
        self,
        directory: Path,
        batches: list[MicroBatch],
        ranks: Ranks,
        lifetime: Lifetime,
        seconds: float = SAVE_SECONDS,
    ) -> None:
        """Identify the training by its micro-batches (collective): checkpoints of another one are not used."""
        self._directory, self._ranks, self._lifetime, self._seconds = directory, ranks, lifetime, seconds
        own = [(batch.indices, batch.lengths.tolist()) for batch in batches]
        self._training = digest(ranks.gather(digest(own)))
        self._part = 0
        """The number of checkpoints of this training so far, by which its parts are counted for `Lifetime`."""
        self._saved_at: float | None = None

    def restore(self) -> tuple[Mapping[str, Tensor], TrainingProgress] | None:
        """The drafter's state and the progress in the newest checkpoint of this training (collective)."""
        path = self._ranks.gather(max(self._directory.glob(f"{self._training}-*.safetensors"), default=None))[0]
        if path is None:
            return None
        stored = load_file(path)
        state = {name.removeprefix(PREFIX): stored.pop(name) for name in list(stored) if name.startswith(PREFIX)}
        self._part = int(state["part"])
        logger.info("the drafter's training goes on after step %d", int(state["done"]))
        return stored, TrainingProgress(
            done=int(state["done"]),
            loss=state["loss"][self._ranks.rank].to(self._ranks.device),
            sums=state["sums"][self._ranks.rank].to(self._ranks.device),
            norms=state["norms"].tolist(),
        )

    def wanted(self) -> bool:
        """Whether this rank wants `reached` to be called after the current training step."""
        if self._saved_at is None:  # the first step: the time before it does not count as training
            self._lifetime.begin_steps(self._part)
            self._saved_at = time.monotonic()
        due = self._ranks.is_first and time.monotonic() - self._saved_at >= self._seconds
        return due or self._lifetime.stop is not None

    def reached(self, drafter: Mapping[str, Tensor], progress: TrainingProgress) -> None:
        """Write a checkpoint, and raise LeftJobError if any rank must leave its job (collective)."""
        started = time.monotonic()
        self._part += 1
        self._save(drafter, progress)
        self._ranks.barrier()
        self._saved_at = time.monotonic()
        self._lifetime.saved(self._saved_at - started)
        stop = self._lifetime.at_boundary(self._ranks, self._part)
        if stop is not None:
            logger.info("leaving after step %d of the drafter's training: %s", progress.done, stop.text)
            raise LeftJobError(stop)

    def finish(self) -> None:
        """End the training and remove its checkpoints; the drafter must be complete on disk."""
        if self._saved_at is not None:
            self._lifetime.end_steps()
        if self._ranks.is_first:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _save(self, drafter: Mapping[str, Tensor], progress: TrainingProgress) -> None:
        everyone = self._ranks.gather((progress.loss.item(), progress.sums.tolist()))
        if not self._ranks.is_first:
            return
        stored = {
            "done": torch.tensor(progress.done),
            "part": torch.tensor(self._part),
            "loss": torch.tensor([loss for loss, _ in everyone], dtype=torch.float64),
            "sums": torch.tensor([sums for _, sums in everyone], dtype=torch.float64),
            "norms": torch.tensor(progress.norms, dtype=torch.float64),
        }
        # The name contains the step, because changed file names show that a stage has made progress.
        path = self._directory / f"{self._training}-{progress.done:08d}.safetensors"
        write_tensors(path, {**drafter} | {PREFIX + name: tensor for name, tensor in stored.items()})
        for other in self._directory.glob("*.safetensors"):
            if other != path:
                other.unlink()
