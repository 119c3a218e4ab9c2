"""The events of a stage that readers of its results should know about, one line of JSON each."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specrl.artifacts import append_line, read_lines, write_text

EVENTS_FILE = "events.jsonl"
SIGNAL = "signal"  # the kind of events reporting that nothing is learned; see `specrl.validation.stopping`


@dataclass(frozen=True)
class Event:
    """Something that happened to a stage, such as a restart or a change of its settings."""

    time: float  # Unix time in seconds
    step: int | None  # the RL step in which it happened; None outside any step
    kind: str  # the kind in one or two words, such as `restart`
    text: str  # what happened, in one line for people


_EVENT = TypeAdapter(Event)


def record_event(stage_dir: Path, kind: str, text: str, step: int | None = None) -> None:
    """Append an event to the events of a stage; `Event` describes the arguments."""
    append_line(stage_dir / EVENTS_FILE, json.dumps(asdict(Event(time.time(), step, kind, text))))


def read_events(stage_dir: Path) -> list[Event]:
    events = []
    for data in read_lines(stage_dir / EVENTS_FILE):
        with contextlib.suppress(ValidationError):  # written by another version of specrl
            events.append(_EVENT.validate_python(data))
    return events


def drop_events(stage_dir: Path, kinds: Collection[str], first_step: int) -> None:
    """Remove events of these kinds in steps from `first_step` on, because those steps are run again."""
    events = read_events(stage_dir)
    kept = [event for event in events if event.kind not in kinds or event.step is None or event.step < first_step]
    if len(kept) < len(events):
        write_text(stage_dir / EVENTS_FILE, "".join(json.dumps(asdict(event)) + "\n" for event in kept))
