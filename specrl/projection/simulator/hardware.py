"""Accelerators by their data sheets, and how much of that performance a run is assumed to reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A GPU model; operations are dense, bandwidths per direction, units bytes and seconds."""

    name: str
    bf16_flops: float
    fp8_flops: float
    memory_bandwidth: float
    memory_gb: float
    link_bandwidth: float  # to GPUs of the same NVLink domain
    network_bandwidth: float  # to GPUs of other domains
    source: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.bf16_flops / 1e12:.0f} and {self.fp8_flops / 1e12:.0f} TFLOP/s in BF16 and FP8, "
            f"{self.memory_bandwidth / 1e12:g} TB/s, {self.link_bandwidth / 1e9:g} GB/s NVLink, "
            f"{self.network_bandwidth / 1e9:g} GB/s network ({self.source})"
        )


HARDWARE = {
    item.name: item
    for item in (
        Hardware("H100", 989e12, 1979e12, 3.35e12, 80, 450e9, 50e9, "NVIDIA H100 data sheet, SXM; ConnectX-7"),
        Hardware("H200", 989e12, 1979e12, 4.8e12, 141, 450e9, 50e9, "NVIDIA H200 data sheet, SXM; ConnectX-7"),
        Hardware("GB200", 2500e12, 5000e12, 8e12, 186, 900e9, 50e9, "NVIDIA GB200 NVL72 data sheet, for each GPU"),
    )
}


@dataclass(frozen=True)
class Efficiency:
    """The fraction of the data-sheet performance that a run reaches, and its overheads; the same for every projection.

    The values were fitted once, jointly on the published rows that `published.py` marks as `chosen_on`.
    """

    flops: float = 0.57  # fraction of the peak, of the engine's matrix products
    bandwidth: float = 0.8
    iteration_s: float = 2.5e-3  # per iteration, for scheduling, sampling and kernel launches; not overlapped
    draft_pass_s: float = 50e-6  # per pass of the drafter, besides its reads and products
    message_s: float = 4e-6  # per exchange, two per layer; the transfer itself is assumed to overlap
    verified_row: float = 0.31  # attention for each further position, as a fraction of reading its request's KV cache
    dense_mfu: float = 0.5  # of the trainer's BF16 peak, including padding and pipeline bubbles
    expert_mfu: float = 0.053  # the same with experts, fitted to the published share of generation at 235B

    def lines(self) -> list[str]:
        return [
            f"the engine's products reach {self.flops:.0%} of the peak and its reads {self.bandwidth:.0%} of the "
            "bandwidth; they overlap in part (root of the sum of squares)",
            f"every iteration takes {self.iteration_s * 1e3:g} ms beside that, every pass of the drafter "
            f"{self.draft_pass_s * 1e6:g} us, every exchange between the GPUs of an engine {self.message_s * 1e6:g} us",
            f"each further position that is verified costs {self.verified_row:.0%} of reading its request's KV cache",
            f"the trainer reaches {self.dense_mfu:.0%} of the BF16 peak with a dense model and {self.expert_mfu:.1%} "
            "with experts",
        ]
