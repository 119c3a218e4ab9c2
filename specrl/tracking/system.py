"""The load of the first rank's machine, which MLflow shows among a stage's system metrics."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from specrl.tracking.tracker import Tracker

INTERVAL_SECONDS = 15.0


class SystemMonitor:
    """Logs the use of processors, memory, disk, network and, where there are any, GPUs, in a thread of its own.

    The names and the measurements are MLflow's. Its own monitor is not used, since it logs to the server directly.
    """

    def __init__(self, tracker: Tracker, began_ms: int) -> None:
        """Start to measure. Steps count intervals since `began_ms`, so that a stage that is started again goes on."""
        self._tracker, self._began_ms = tracker, began_ms
        self._parts = _parts()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        self._measure()  # rates are since the last measurement, and the first one has none
        while not self._ended.wait(INTERVAL_SECONDS):
            self._log()
        self._log()  # a short stage has one measurement, of all its time

    def _log(self) -> None:
        step = int((time.time() * 1000 - self._began_ms) / 1000 / INTERVAL_SECONDS)
        self._tracker.log_metrics(self._measure(), step)

    def _measure(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for part in self._parts:
            part.collect_metrics()
            metrics |= {f"system/{name}": value for name, value in part.aggregate_metrics().items()}
            part.clear_metrics()
        return metrics


def _parts() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    parts: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with contextlib.suppress(ImportError, RuntimeError):  # no library for NVIDIA's GPUs, or no GPU
        parts.append(GPUMonitor())
    return parts
