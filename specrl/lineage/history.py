"""The history of a train stage that continues another: records and rollouts, linked to the other's files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from specrl.artifacts import CURVE_FOLDER, atomic_path
from specrl.events import EVENTS_FILE, read_events, record_event
from specrl.lineage.record import BEST_FILE, MANIFEST, Continuation, saved_steps

RUN_ID = "mlflow_run_id"  # a file that a continuation extends, and therefore copies

ADOPTED = "adopted"  # the folder of the best checkpoint before a continuation; training does not continue from it
CHANGES = ("settings", "code")  # the kinds of events that record changes during a run


def begin_continuation(stage_dir: Path, previous: Path, step: int, events: Sequence[tuple[str, str]]) -> None:
    """Make the folder of a train stage that continues from `step` under another key, with old and new events.

    `previous` is the run's train stage before the change, which may not have trained yet.
    """
    stage_dir.mkdir(parents=True, exist_ok=True)
    (stage_dir / EVENTS_FILE).unlink(missing_ok=True)  # left by a killed call
    for name in (EVENTS_FILE, RUN_ID):
        if (previous / name).exists():
            with atomic_path(stage_dir / name) as temporary:
                shutil.copyfile(previous / name, temporary)
    for kind, text in events:
        record_event(stage_dir, kind, text, step)


def adopt_history(stage_dir: Path, start: Continuation) -> None:
    """Link the records and rollouts of the steps before the continuation, unless the stage has its own checkpoint.

    The scores of validated policies and the best checkpoint are linked too. The new folder then contains the whole
    history of the run, and the old one stays unchanged.
    """
    if not start.counts_on or saved_steps(stage_dir):
        return
    for folder, last in {"steps": start.step - 1, "rollouts": start.step - 1, CURVE_FOLDER: start.step}.items():
        for source in sorted((start.stage_dir / folder).rglob("*")):
            name = source.relative_to(start.stage_dir / folder)
            if source.is_file() and name.parts[0].startswith("step=") and _step(name) <= last:
                link(source, stage_dir / folder / name)
    best = kept_checkpoints(start.stage_dir).get(_best_step(start.stage_dir))
    if best is not None and _step(Path(best.name)) <= start.step:
        for source in sorted(best.iterdir(), key=lambda path: path.name == MANIFEST):
            link(source, stage_dir / ADOPTED / best.name / source.name)


def kept_checkpoints(stage_dir: Path) -> dict[int, Path]:
    """The folders of a train stage's complete checkpoints, including an adopted one, by step."""
    folders = [path for parent in (ADOPTED, "checkpoints") for path in (stage_dir / parent).glob("step=*")]
    return {_step(Path(folder.name)): folder for folder in folders if (folder / MANIFEST).exists()}


def _best_step(stage_dir: Path) -> int:
    path = stage_dir / "checkpoints" / BEST_FILE
    return int(json.loads(path.read_text())["step"]) if path.exists() else -1


def changes_by_step(stage_dir: Path) -> dict[int, list[str]]:
    """The changes made during the run, in words, by the RL step from which they apply."""
    found: dict[int, list[str]] = {}
    for event in read_events(stage_dir):
        if event.kind in CHANGES and event.step is not None:
            found.setdefault(event.step, []).append(event.text)
    return found


def link_files(folder: Path, target: Path) -> None:
    """Put the files of a folder into another one, without copying gigabytes if possible."""
    for path in sorted(folder.iterdir()):
        link(path, target / path.name)


def link(source: Path, target: Path) -> None:
    """Hard-link `target` to `source`, or copy it if the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with atomic_path(target) as temporary:
            shutil.copyfile(source, temporary)


def _step(name: Path) -> int:
    return int(name.parts[0].partition(".")[0].partition("=")[2])
