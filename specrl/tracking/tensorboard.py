"""TensorBoard files: the metrics of each stage and of the run, written by the process that logs them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Lock
from typing import Any

from specrl.tracking.log import Log

FOLDER = "tensorboard"


class EventFile:
    """The metrics that one process logs for a run or a stage, in `RUN/tensorboard/OWNER`."""

    def __init__(self, log: Log) -> None:
        run_dir = log.owner.parent.parent if log.owner.parent.name == "stages" else log.owner
        self._log, self.folder = log, run_dir / FOLDER / log.owner.name
        self._lock = Lock()
        self._writer: Any = None

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write logged metrics; an OSError if the disk fails, or whatever tensorboardX raises."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with self._lock:
            if self._writer is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                # Its name has the time in whole seconds: the size of the log keeps two processes of a second apart.
                self._writer = EventsWriter(str(self.folder / "events"), f".{self._log.path.stat().st_size}")
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()
