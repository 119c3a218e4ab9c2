"""The load of a stage's nodes, shown among MLflow's system metrics.

Names and measurements are MLflow's, but its own monitor would log directly to the server.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specrl.artifacts import read_object, write_json
from specrl.tracking.store import import_mlflow
from specrl.tracking.tracker import Tracker

INTERVAL_SECONDS = 15.0


class LoadMonitor:
    """Measures processors, memory, disk, network and GPUs in a thread."""

    def __init__(self, on_load: Callable[[Mapping[str, float]], None]) -> None:
        import_mlflow()
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._on_load = on_load
        self._parts: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with contextlib.suppress(ImportError, RuntimeError):  # no NVIDIA library, or no GPU
            self._parts.append(GPUMonitor())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        self._measure()  # rates refer to the previous measurement, which the first one lacks
        while not self._ended.wait(INTERVAL_SECONDS):
            self._on_load(self._measure())
        self._on_load(self._measure())  # a short stage gets one measurement, over its whole duration

    def _measure(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in self._parts:
            part.collect_metrics()
            found |= part.aggregate_metrics()
            part.clear_metrics()
        return found


def leave_load(path: Path, load: Mapping[str, float]) -> None:
    """Write a node's load for the first rank, the only one that logs."""
    with contextlib.suppress(OSError):  # a full disk only costs measurements
        write_json(path, load)


def log_load(tracker: Tracker, began_ms: int, nodes: Path, load: Mapping[str, float]) -> None:
    """Log the load of the first node, and of the others from the folder `nodes`.

    Steps count intervals since `began_ms`, so that they continue when a stage is restarted.
    """
    metrics = {f"system/{name}": value for name, value in load.items()}
    for path in sorted(nodes.glob("*.json")):
        metrics |= {f"system/node_{path.stem}/{name}": value for name, value in read_object(path).items()}
        path.unlink(missing_ok=True)
    step = int((time.time() * 1000 - began_ms) / 1000 / INTERVAL_SECONDS)
    tracker.log_metrics(metrics, step)
