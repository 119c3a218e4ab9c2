"""The time of one engine iteration, from a model's shape and a GPU's data sheet (a roofline model).

Weights are read once per iteration; of the experts, only those to which a row is routed. The KV cache is read once per
request, and partly again for each further position that is verified. Weight reads and matrix products overlap partly:
together they take the root of the sum of their squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from specrl.models.shapes import ModelShape

BF16 = 2


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


@dataclass(frozen=True)
class EngineModel:
    """An engine on one or several GPUs that decodes with k drafts per request."""

    shape: ModelShape
    hardware: Hardware
    gpus: int = 1  # weights, KV cache and products are divided evenly among them
    is_fp8: bool = False  # in linear layers and KV cache; output layer and drafter are in BF16
    k: float = 0  # drafts verified per request
    passes: float | None = None  # passes of the drafter per iteration; one per draft if it makes all of them
    prompt_tokens: int = 512
    draft_vocab_size: int = 32000
    efficiency: Efficiency = field(default_factory=Efficiency)

    def at(self, running: float, generated: float) -> float:
        """The seconds of an iteration with `running` requests that have so many generated tokens on average."""
        rows, size = running * (self.k + 1), 1 if self.is_fp8 else BF16
        context = self.prompt_tokens + generated
        weights, products = self._weight_bytes(rows, size) / self._bandwidth, rows * self.row_s
        kv_bytes = 2 * self.shape.kv_size * self.shape.num_layers * size
        attention = running * context * kv_bytes * (1 + self.efficiency.verified_row * self.k) / self._bandwidth
        exchange = 2 * self.shape.num_layers * self.efficiency.message_s if self.gpus > 1 else 0.0
        passes = self.k if self.passes is None else self.passes
        drafting = self._drafting_s(running, context, passes) if passes else 0.0
        return math.hypot(weights, products) + attention + exchange + drafting + self.efficiency.iteration_s

    @cached_property
    def _bandwidth(self) -> float:
        return self.gpus * self.hardware.memory_bandwidth * self.efficiency.bandwidth

    @cached_property
    def _bf16_flops(self) -> float:
        return self.gpus * self.hardware.bf16_flops * self.efficiency.flops

    @cached_property
    def _dense(self) -> float:
        shape = self.shape
        return shape.num_layers * (shape.linear_parameters_per_layer - shape.expert_parameters_per_layer)

    def _weight_bytes(self, rows: float, size: int) -> float:
        shape, experts = self.shape, 0.0
        if shape.num_experts:
            reached = 1 - (1 - shape.experts_per_token / shape.num_experts) ** rows
            experts = reached * shape.num_layers * shape.expert_parameters_per_layer
        return (self._dense + experts) * size + shape.embedding_parameters * BF16

    @cached_property
    def row_s(self) -> float:
        """The seconds of the matrix products for one more row."""
        shape = self.shape
        active = self._dense + shape.num_layers * shape.experts_per_token * shape.expert_parameters
        flops = self._bf16_flops * (self.hardware.fp8_flops / self.hardware.bf16_flops if self.is_fp8 else 1.0)
        return 2 * active / flops + 2 * shape.embedding_parameters / self._bf16_flops

    @cached_property
    def drafter_parameters(self) -> float:
        # EAGLE-3; see `memory.Rank.drafter_parameters`.
        shape, hidden = self.shape, self.shape.hidden_size
        attention = 2 * hidden * (shape.query_size + 2 * shape.kv_size) + hidden * shape.query_size
        return 3 * hidden * (hidden + shape.intermediate_size) + attention + self.draft_vocab_size * hidden

    def _drafting_s(self, running: float, context: float, passes: float) -> float:
        # Passes with one position per request; then the products for the verified positions.
        parameters = self.drafter_parameters
        cache = running * context * 2 * self.shape.kv_size * BF16
        products = 2 * running * parameters / self._bf16_flops
        each = (parameters * BF16 + cache) / self._bandwidth + products + self.efficiency.draft_pass_s
        return passes * each + (self.k + 1) * products
