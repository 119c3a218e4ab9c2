"""The checkpoints of a stage: written during the next step's generation, verified on load, removed when old.

A step waits only for a copy of the state in host memory. A thread of each rank then writes the rank's file; that of the
first rank waits for the others, writes the manifest and gives the folder its name. `directory/step=000012/` contains
all that step 12 needs, in safetensors and JSON, readable in any layout.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from specrl.artifacts import PASSING, write_json
from specrl.distributed import TIMEOUT
from specrl.lineage.history import ADOPTED
from specrl.lineage.record import BEST_FILE
from specrl.models.hf_io import write_tensors
from specrl.training.checkpoint.files import HostCopy, checksum_of, sync_folder
from specrl.training.checkpoint.load import DRAFTER_FILE, Restored, TrainState, load_newest
from specrl.training.checkpoint.manifest import CheckpointError, Manifest, StoredFile, write_manifest
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron.policy import Policy
from specrl.training.pieces import Shard, stored_name

DAMAGED = "damaged-"
NICENESS = 10
"""The niceness of the writing threads, so that generation has priority."""

Report = list[StoredFile] | OSError
"""The files that a rank has written for a checkpoint, or why it could not; the number of another error is 0."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    last: int
    every: int | None = None
    """All those of steps that are multiples of this number; None for no others."""

    def old(self, steps: list[int], best: int | None) -> list[int]:
        """Which of the steps, in ascending order, no longer need their checkpoints."""
        others = (step for step in steps[: -self.last] if step != best)
        return [step for step in others if self.every is None or step % self.every]


class Checkpoints:
    """Writes and restores the checkpoints of one folder. All methods but `mark_best` are collective over the ranks."""

    def __init__(self, directory: Path, policy: Policy, retention: Retention) -> None:
        """Allocate the host memory for a copy of the state; remove checkpoints that were interrupted half-written."""
        self.directory = directory
        self._policy, self._ranks, self._retention = policy, policy.ranks, retention
        # Without a group of its own, the thread's messages would mix with the step's.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if self._ranks.world_size > 1 else None
        self._copy, self._drafter_copy = HostCopy(), HostCopy()
        self._copy.fill(written_tensors(policy.shards()))  # otherwise a lack of memory would show hours later
        pieces = (shard.pieces for shard in policy.shards() if shard.is_written)
        self._pieces = self._ranks.gather(tuple(chain.from_iterable(pieces)))
        self.seconds = 0.0
        """How long the writing of the last complete checkpoint took, after its copy; known on the first rank. Before
        the first it is the time that the last one took to read, or 0 without any."""
        self._writing: Future[None] | None = None
        self._best_step: int | None = None
        """The step of the checkpoint marked as the best, which may not be complete yet."""
        self._naming = threading.Lock()
        """Held while a checkpoint is given its name, or looked up by it."""
        self.newest: int | None = None
        """The step of the newest checkpoint, written or still being written; None before the first."""
        if self._ranks.is_first:
            for unfinished in directory.glob(".step=*"):
                shutil.rmtree(unfinished)
        self._ranks.barrier()

    def restore(self, drafter: Drafter | None) -> Restored | None:
        """Restore the newest intact checkpoint, and rename damaged ones; raise CheckpointError if all are damaged."""
        started = time.monotonic()
        steps = self._ranks.gather(self._steps())[0]
        if not steps:
            return None
        found = load_newest([self._folder(step) for step in reversed(steps)], self._policy, drafter)
        self._set_aside(steps[len(steps) - len(found.damaged) :])
        self.newest, self.seconds = found.state.step, time.monotonic() - started
        return found

    def save(self, state: TrainState) -> None:
        """Wait for the last checkpoint, copy the state and start writing; raise CheckpointError if the last failed."""
        if self._writing is not None and not self._writing.done():
            logger.info("the next checkpoint is due: waiting until the last one is written")
        self.wait()
        assert state.policy is self._policy, "the copy is of another policy"
        policy = self._copy.fill(written_tensors(self._policy.shards()))
        manifest = Manifest(
            step=state.step,
            model=self._policy.shape_in_words,
            counters=self._policy.optimizer.counters(),
            tensors=self._policy.tensor_shapes(),
            files=(),
            has_drafter=state.drafter is not None,
            kv_scales=state.kv_scales,
            adapter_scale=self._policy.lora.scale if self._policy.lora is not None else None,
        )
        self.newest = state.step
        parts = {f"policy-{self._ranks.rank:05d}.safetensors": policy}
        if state.drafter is not None and self._ranks.is_first:
            parts[DRAFTER_FILE] = self._drafter_copy.fill(state.drafter.state_dict())
        self._writing = _beside(lambda: self._write(manifest, parts))

    def check(self) -> None:
        """Raise an error on all ranks if writing the last checkpoint failed on any; do not wait for it.

        It is a CheckpointError, or an OSError that passes, after which another job goes on.
        """
        done = self._writing is not None and self._writing.done()
        error = self._writing.exception() if done and self._writing is not None else None
        own = (str(error), getattr(error.__cause__, "errno", None)) if error is not None else None
        found = next((failure for failure in self._ranks.gather(own) if failure is not None), None)
        if found is not None:
            text, number = found
            raise (OSError(number, text) if number in PASSING else CheckpointError(text)) from error

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.exception()
        self.check()
        self._writing = None

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint from which `step` starts until another one is marked.

        The one marked before stays until this one is complete: a kill must not leave the run without either. It may be
        one that the stage adopted: the next continuation adopts the one marked here.
        """
        with self._naming:
            self._best_step = step
            folder = self._folder(step)
            if self._ranks.is_first and (folder.exists() or (self.directory.parent / ADOPTED / folder.name).exists()):
                self._write_best(step)

    def _write_best(self, step: int) -> None:
        write_json(self.directory / BEST_FILE, {"step": step})

    def _write(self, manifest: Manifest, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        started = time.monotonic()
        folder = self.directory / f".step={manifest.step:06d}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = [_written(folder / name, tensors) for name, tensors in parts.items()]
            report: Report = files
        except Exception as error:  # any error, because the others wait for a report
            number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (0, None)
            report = OSError(number, f"rank {self._ranks.rank}: {words or error or type(error).__name__}")
        reports = self._ranks.gather(report, self._group)
        if not self._ranks.is_first:
            return
        written = [files for files in reports if not isinstance(files, OSError)]
        try:
            for failure in reports:
                if isinstance(failure, OSError):
                    raise failure
            self._complete(folder, manifest, written)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            why, remedy = error.strerror or error, "make room or repair the disk, then resume the run, which goes on"
            raise CheckpointError(
                f"the checkpoint for step {manifest.step} cannot be written to {self.directory} ({why}): "
                f"{'another job goes on' if error.errno in PASSING else remedy} from the checkpoint before"
            ) from error
        size = sum(file.size for files in written for file in files)
        self.seconds = time.monotonic() - started
        logger.info("checkpoint for step %d: %.2f GB written in %.1f s", manifest.step, size / 1e9, self.seconds)

    def _complete(self, folder: Path, manifest: Manifest, reports: list[list[StoredFile]]) -> None:
        files = [
            replace(file, pieces=pieces if file.name != DRAFTER_FILE else ())
            for report, pieces in zip(reports, self._pieces, strict=True)
            for file in report
        ]
        write_manifest(folder, replace(manifest, files=tuple(files)))
        sync_folder(folder)
        final = self._folder(manifest.step)
        if final.exists():  # left by an earlier start whose newer checkpoints were damaged
            _remove(final)
        with self._naming:
            folder.replace(final)
            if self._best_step == manifest.step:
                self._write_best(manifest.step)
        sync_folder(self.directory)
        for step in self._retention.old(self._steps(), self._best()):
            _remove(self._folder(step))
        for damaged in self.directory.glob(f"{DAMAGED}*"):
            _remove(damaged)

    def _folder(self, step: int) -> Path:
        return self.directory / f"step={step:06d}"

    def _steps(self) -> list[int]:
        return sorted(int(path.name.partition("=")[2]) for path in self.directory.glob("step=*"))

    def _best(self) -> int | None:
        path = self.directory / BEST_FILE
        return int(json.loads(path.read_text())["step"]) if path.exists() else None

    def _set_aside(self, steps: list[int]) -> None:
        if self._ranks.is_first:
            for step in steps:
                aside = self.directory / f"{DAMAGED}step={step:06d}"
                shutil.rmtree(aside, ignore_errors=True)
                self._folder(step).replace(aside)
        self._ranks.barrier()


def written_tensors(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """The matrices that this rank writes, by their names in the file; they are not copies."""
    found = {}
    for shard in shards:
        sizes = [piece.size for piece in shard.pieces]
        for kind, flat in shard.state.items() if shard.is_written else ():
            for piece, part in zip(shard.pieces, torch.split(flat, sizes), strict=True):
                found[stored_name(kind, piece)] = part.view(piece.shape)
    return found


def _written(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    write_tensors(path, tensors)
    return StoredFile(path.name, path.stat().st_size, checksum_of(path))


def _remove(folder: Path) -> None:
    """Remove a checkpoint; a kill in between leaves nothing that looks like one."""
    hidden = folder.with_name(f".{folder.name.removeprefix(DAMAGED)}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _beside(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a low-priority daemon thread."""
    future: Future[None] = Future()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            work()
        except Exception as error:  # raised again on all ranks by `check`
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
