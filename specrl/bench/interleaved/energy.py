"""The energy counters of this machine: RAPL of its processors, and NVML of its GPUs.

They count the whole machine, so that a difference belongs to one process only while nothing else computes. RAPL is in
the Linux kernel and often readable for the administrator alone; virtual machines mostly have none.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
"""The folder of the kernel's counters. Those of whole processors are called `intel-rapl:N`, on AMD as well."""
NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class RaplCounter:
    """The counter of one processor, in microjoules, which begins again at 0 after `limit`."""

    path: Path
    limit: int

    def read(self) -> int:
        """Return the present count."""
        return int((self.path / "energy_uj").read_text())


class EnergyMeter:
    """The energy that the processors and the GPUs of this machine take from one call of `lap` to the next."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        """Find the counters, and begin to count.

        Args:
            powercap: The folder of the kernel's counters.
        """
        self._processors = rapl_counters(powercap)
        self._gpus = Gpus()
        self._before = self._read()

    @property
    def source(self) -> str:
        """The counters that there are, in words; empty without any."""
        found = ["RAPL"] * bool(self._processors) + ["NVML"] * bool(self._gpus.handles)
        return " and ".join(found)

    def lap(self) -> float | None:
        """Return the joules since the last call, or since the start; None where this machine has no counter."""
        before, self._before = self._before, self._read()
        if not self._before:
            return None
        limits = [counter.limit for counter in self._processors] + [0] * len(self._gpus.handles)
        pairs = zip(self._before, before, limits, strict=True)
        return sum(now - then if now >= then else now - then + limit for now, then, limit in pairs) / 1e6

    def _read(self) -> list[int]:
        """Return all counts in microjoules, those of the processors first."""
        return [*(counter.read() for counter in self._processors), *self._gpus.read()]


def rapl_counters(powercap: Path) -> list[RaplCounter]:
    """Return the counters of the processors that this process may read."""
    found = []
    for path in sorted(powercap.glob("intel-rapl:*")):
        if path.name.count(":") > 1:  # a part of a processor, which the processor's own counter includes
            continue
        try:
            counter = RaplCounter(path, int((path / "max_energy_range_uj").read_text()))
            counter.read()
        except (OSError, ValueError):
            continue
        found.append(counter)
    return found


class Gpus:
    """The energy counters of NVIDIA's GPUs, from the Volta generation on."""

    def __init__(self) -> None:
        """Open NVML, and find the GPUs that count; there are none where NVML is not installed."""
        self.handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(NVML)
        except OSError:
            return
        count = ctypes.c_uint()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            code = self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            if not code and self._millijoules(handle) is not None:
                self.handles.append(handle)

    def read(self) -> list[int]:
        """Return the counts in microjoules."""
        return [1000 * (self._millijoules(handle) or 0) for handle in self.handles]

    def _millijoules(self, handle: ctypes.c_void_p) -> int | None:
        value = ctypes.c_ulonglong()
        code = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value))
        return None if code else value.value
