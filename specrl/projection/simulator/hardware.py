"""Accelerators as their data sheets describe them, and how much of that a run is assumed to reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One GPU of a kind, as its data sheet describes it."""

    name: str
    bf16_flops: float
    """Dense BF16 operations per second."""
    fp8_flops: float
    """Dense FP8 operations per second."""
    memory_bandwidth: float
    """Bytes per second from its memory."""
    memory_gb: float
    """The size of its memory in GB."""
    link_bandwidth: float
    """Bytes per second to the other GPUs of its NVLink domain, in each direction."""
    network_bandwidth: float
    """Bytes per second to GPUs of other domains, in each direction."""
    source: str
    """Where the figures are from."""


HARDWARE = {
    item.name: item
    for item in (
        Hardware("H100", 989e12, 1979e12, 3.35e12, 80, 450e9, 50e9, "NVIDIA H100 data sheet, SXM; ConnectX-7"),
        Hardware("H200", 989e12, 1979e12, 4.8e12, 141, 450e9, 50e9, "NVIDIA H200 data sheet, SXM; ConnectX-7"),
        Hardware("GB200", 2500e12, 5000e12, 8e12, 186, 900e9, 50e9, "NVIDIA GB200 NVL72 data sheet, for each GPU"),
    )
}
"""The GPUs that a run can be projected to, by name. Operations are without sparsity."""


@dataclass(frozen=True)
class Efficiency:
    """How much of a data sheet a run reaches, and what it spends beside arithmetic: the same for every projection."""

    flops: float = 0.57
    """The share of the peak that the engine's matrix products reach."""
    bandwidth: float = 0.8
    """The share of the memory bandwidth that the engine reaches."""
    iteration_s: float = 2.5e-3
    """Seconds of every engine iteration for scheduling, sampling and launching, which no computation hides."""
    draft_pass_s: float = 50e-6
    """Seconds of every pass of the drafter beside its bytes and products."""
    message_s: float = 4e-6
    """Seconds of each of a layer's two exchanges between the GPUs of an engine; their bytes are taken as hidden."""
    verified_row: float = 0.31
    """What attention costs for every further position of a request, as a share of reading its KV cache once."""
    dense_mfu: float = 0.5
    """The share of the BF16 peak that the trainer reaches with a dense model, padding and pipeline bubbles included."""
    expert_mfu: float = 0.053
    """The same with experts, chosen so that generation has its published share of a step of Qwen3-235B-A22B."""

    def lines(self) -> list[str]:
        """Return what is assumed, a line for each."""
        return [
            f"the engine's products reach {self.flops:.0%} of the peak and its reads {self.bandwidth:.0%} of the "
            "bandwidth; they overlap in part (root of the sum of squares)",
            f"every iteration takes {self.iteration_s * 1e3:g} ms beside that, every pass of the drafter "
            f"{self.draft_pass_s * 1e6:g} us, every exchange between the GPUs of an engine {self.message_s * 1e6:g} us",
            f"each further position that is verified costs {self.verified_row:.0%} of reading its request's KV cache",
            f"the trainer reaches {self.dense_mfu:.0%} of the BF16 peak with a dense model and {self.expert_mfu:.1%} "
            "with experts",
        ]
