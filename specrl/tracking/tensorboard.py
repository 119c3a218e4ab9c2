"""TensorBoard's files: the metrics of each stage and of the run, written whether or not MLflow answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrl.tracking.log import Log, Sent

FOLDER = "tensorboard"


class EventFiles:
    """Writes what a log says of metrics to `RUN/tensorboard/OWNER`, each entry once, in a new file for each process."""

    def __init__(self, run_dir: Path, log: Log) -> None:
        self._folder, self._sent = run_dir / FOLDER / log.owner.name, Sent(log, FOLDER)
        self._writer: Any = None

    def write(self) -> None:
        """Write what has been logged since the last call; an OSError leaves it for the next one."""
        self._sent.refresh()
        entries = list(self._sent.waiting())
        if own := [entry for entry in entries if entry.kind == "metrics"]:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.proto.summary_pb2 import Summary

            writer = self._writer = self._writer or _new_file(self._folder, first=own[0].begin)
            for entry in own:
                metrics = entry.values["metrics"].items()
                values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics]
                event = Event(wall_time=entry.time_ms / 1000, step=entry.values["step"], summary=Summary(value=values))
                writer.write_event(event)
            writer.flush()
        if entries:
            self._sent.log.flush()
            self._sent.note(entries)


def _new_file(folder: Path, first: int) -> Any:
    from tensorboardX.event_file_writer import EventsWriter

    folder.mkdir(parents=True, exist_ok=True)
    # Its name has the time in whole seconds: `first` keeps two processes of a second apart.
    return EventsWriter(str(folder / "events"), f".{first}")
