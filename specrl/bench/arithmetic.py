"""The least time of a step's parts: what must be computed and read, at the rates that this machine reaches.

Counted are the matrix products, attention's among them, and what is read of weights and of the KV cache. Norms, the
sampler, probes and everything else are left out, so that these are lower bounds; what matters is how they grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrl.models.shapes import ModelShape

BYTES = 2
"""The bytes of a weight, and of an element of the KV cache."""
MASTER_BYTES = 28
"""What the optimizer reads and writes of a parameter: gradient, master and two moments in FP32, each but the gradient
written too."""
REFIT_BYTES = 3 * BYTES
"""What a refit reads and writes of a parameter: the trainer's weight, and the engine's, which is then packed."""


@dataclass(frozen=True)
class Machine:
    """The measured speed of a machine, with the threads of a rank."""

    bytes_per_s: float
    """The rate of reading memory, in bytes per second."""
    flops_per_s: float
    """The rate of matrix products in the model's type and shapes with many rows, in operations per second."""


def generation_s(shape: ModelShape, prompts: Sequence[int], responses: Sequence[int], machine: Machine) -> float:
    """Return the least seconds of plain decoding on one rank.

    Args:
        prompts: The length of each request's prompt.
        responses: The length of its response.
    """
    seconds = products_s(shape, sum(prompts), machine) + attention_s(shape, prompts, machine)
    read = 0
    for position in range(1, max(responses)):
        running = [prompt + position for prompt, total in zip(prompts, responses, strict=True) if total > position]
        reading = linear_weights(shape) * BYTES / machine.bytes_per_s
        seconds += max(reading, products_s(shape, len(running), machine))
        read += sum(running)
    return seconds + read * 2 * shape.num_layers * shape.kv_size * BYTES / machine.bytes_per_s


def update_s(shape: ModelShape, prompts: Sequence[int], responses: Sequence[int], machine: Machine) -> float:
    """Return the least seconds of forward pass, backward pass and optimizer on one rank.

    Args:
        prompts: The length of each sequence's prompt.
        responses: The length of its response.
    """
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    products = training_products_s(shape, sum(lengths), sum(responses), machine)
    moved = shape.parameters * MASTER_BYTES / machine.bytes_per_s
    return products + 3 * attention_s(shape, lengths, machine) + moved


def training_products_s(shape: ModelShape, tokens: int, responses: int, machine: Machine) -> float:
    """Return the least seconds of the linear layers in a forward and a backward pass, which takes twice as many.

    Args:
        tokens: The number of tokens.
        responses: How many of them are response tokens: only these need the output layer.
    """
    return training_flops(shape, tokens, responses) / machine.flops_per_s


def training_flops(shape: ModelShape, tokens: int, responses: int) -> float:
    """Return the operations of the linear layers in a forward and a backward pass, which takes twice as many.

    Args:
        tokens: The number of tokens.
        responses: How many of them are response tokens: only these need the output layer.
    """
    weights = active_weights_per_layer(shape) * shape.num_layers * tokens + shape.embedding_parameters * responses
    return 3 * 2 * weights


def active_weights_per_layer(shape: ModelShape) -> int:
    """Return the number of weights of a layer that one token is multiplied with: of the experts only its own."""
    idle = shape.num_experts - shape.experts_per_token
    return shape.linear_parameters_per_layer - idle * shape.expert_parameters


def refit_s(shape: ModelShape, machine: Machine) -> float:
    """Return the least seconds in which an engine takes over the trainer's weights."""
    return shape.parameters * REFIT_BYTES / machine.bytes_per_s


def linear_weights(shape: ModelShape) -> int:
    """Return the number of weights that each token is multiplied with."""
    return shape.num_layers * shape.linear_parameters_per_layer + shape.embedding_parameters


def products_s(shape: ModelShape, tokens: int, machine: Machine) -> float:
    """Return the least seconds of the linear layers of one forward pass."""
    return 2 * linear_weights(shape) * tokens / machine.flops_per_s


def attention_s(shape: ModelShape, lengths: Sequence[int], machine: Machine) -> float:
    """Return the least seconds of causal attention over whole sequences in one forward pass."""
    return attention_flops(shape, lengths) / machine.flops_per_s


def attention_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Return the operations of causal attention over whole sequences in one forward pass."""
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 4 * shape.query_size * shape.num_layers * pairs
