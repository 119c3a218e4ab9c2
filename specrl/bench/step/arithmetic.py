"""The least time of a step's parts: what must be computed and read, at the rates that this machine reaches.

Counted are the matrix products, attention's among them, and what is read of weights and of the KV cache. Norms, the
sampler, probes and everything else are left out, so that these are lower bounds; what matters is how they grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specrl.bench.rollouts.machine import measure
from specrl.bench.rollouts.roofline import Machine
from specrl.models.shapes import ModelShape

BYTES = 2
"""The bytes of a weight, and of an element of the KV cache."""
MASTER_BYTES = 28
"""What the optimizer reads and writes of a parameter: gradient, master and two moments in FP32, each but the gradient
written too."""
REFIT_BYTES = 3 * BYTES
"""What a refit reads and writes of a parameter: the trainer's weight, and the engine's, which is then packed."""


def measure_machine(shape: ModelShape, threads: int) -> Machine:
    """Return this machine's rates with so many threads, its matrix rate on products of this shape."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = measure(shape.hidden_size, shape.intermediate_size, torch.bfloat16, torch.device("cpu"))
    torch.set_num_threads(before)
    return found


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
    weights = shape.num_layers * shape.linear_parameters_per_layer * tokens + shape.embedding_parameters * responses
    return 3 * 2 * weights / machine.flops_per_s


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
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 4 * shape.query_size * shape.num_layers * pairs / machine.flops_per_s
