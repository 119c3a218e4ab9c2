"""The speeds with which the plan turns bytes into seconds: assumptions, each of which it prints."""

from __future__ import annotations

from dataclasses import dataclass

from specrl.config import Config
from specrl.projection.memory import PREGENERATED

GB = 1e9
"""The bytes of a GB, in which speeds are given."""
INSIDE_GB_PER_S = {0: 3.0, 1: 300.0}
"""Between two ranks of a node, in each direction: gloo over the loopback device, or NVLink 4 at two thirds."""
NETWORK_GB_PER_S = {0: 1.0, 1: 40.0}
"""Between nodes, for each rank and direction: 10 Gb/s Ethernet, or an adapter of 400 Gb/s at four fifths."""
HOST_GB_PER_S = {0: 5.0, 1: 20.0}
"""Between a rank's memory and a copy in host memory: a copy in memory, or PCIe 5 with pinned memory, shared by two."""
DISK_GB_PER_S = {0: 0.5, 1: 5.0}
"""From all nodes together to the file system of the runs folder: a disk, or a parallel file system."""
MESSAGE_S = 50e-6
"""The seconds that a message takes beside its bytes."""
MEAN_FILL = 0.5
"""The mean length of prompt and response together, as a share of `model.max_length`."""


@dataclass(frozen=True)
class Speeds:
    """The assumed speeds, in GB/s, and lengths."""

    inside: float
    network: float
    host: float
    disk: float
    mean_tokens: float
    """The mean number of tokens of a prompt with its response."""
    lines: tuple[str, ...]
    """What is assumed, a line for each."""

    @classmethod
    def of(cls, config: Config, gpu: int) -> Speeds:
        """Return what is assumed of a run.

        Args:
            gpu: 1 where the ranks of the train stage have GPUs, otherwise 0.
        """
        network = config.cluster.network_gb_per_s or NETWORK_GB_PER_S[gpu]
        disk = config.cluster.disk_gb_per_s or DISK_GB_PER_S[gpu]
        inside, host, mean = INSIDE_GB_PER_S[gpu], HOST_GB_PER_S[gpu], MEAN_FILL * config.model.max_length
        lines = (
            f"{inside:g} GB/s between ranks of a node ({'NVLink' if gpu else 'loopback'})",
            f"{network:g} GB/s for each rank between nodes (cluster.network_gb_per_s)",
            f"{host:g} GB/s from a rank to host memory",
            f"{disk:g} GB/s to the disk of runs_dir, for all nodes together (cluster.disk_gb_per_s)",
            f"{MESSAGE_S * 1e6:g} us for each message of a refit",
            f"{mean:g} tokens of prompt and response on average, {MEAN_FILL:.0%} of model.max_length",
            f"{PREGENERATED:.0%} of the next step's tokens generated before it, where idle engines do that",
            "transfers are counted one after another, none of them hidden behind computation",
        )
        return cls(inside, network, host, disk, mean, lines)
