"""The least time of an engine iteration, which is the time of reading the weights once or that of the arithmetic.

Only matrix products are counted. Attention over the cache, norms and the sampler are left out, so that this is a lower
bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specrl.bench.arithmetic import Machine

ONE_PER_SECOND = Machine(1.0, 1.0)


@dataclass(frozen=True)
class Network:
    """A network that an iteration runs."""

    weights: int
    """The number of elements of the matrices that each row is multiplied with."""
    bytes_per_weight: int

    def seconds(self, rows: int, machine: Machine) -> float:
        """Return the least time in seconds of one pass over `rows` tokens."""
        reading = self.weights * self.bytes_per_weight / machine.bytes_per_s
        return max(reading, 2 * self.weights * rows / machine.flops_per_s)


@dataclass(frozen=True)
class Roofline:
    """The networks of a speculative iteration, and the machine that runs them."""

    policy: Network
    drafter: Network | None
    """The drafter's layer and head; None if drafts need no network."""
    fusion: Network | None = None
    """The drafter's `fc`, which combines the features of each row once per iteration."""
    machine: Machine = ONE_PER_SECOND

    def plain_seconds(self, batch: int) -> float:
        """Return the least time of a plain iteration with `batch` requests."""
        return self.policy.seconds(batch, self.machine)

    def speculative_seconds(self, batch: int, k: int) -> float:
        """Return the least time of an iteration with drafts of k tokens.

        The policy runs on k + 1 rows per request, and the drafter on as many, then k - 1 times on one per request.
        """
        rows = batch * (k + 1)
        seconds = self.policy.seconds(rows, self.machine)
        if self.drafter is not None:
            seconds += self.drafter.seconds(rows, self.machine) + (k - 1) * self.drafter.seconds(batch, self.machine)
        if self.fusion is not None:
            seconds += self.fusion.seconds(rows, self.machine)
        return seconds

    def speedup(self, batch: int, k: int, acceptance_length: float) -> float:
        """Return the ratio of tokens per second to plain decoding at a measured acceptance length."""
        return acceptance_length * self.plain_seconds(batch) / self.speculative_seconds(batch, k)


def policy_network(hf_config: dict[str, Any], bytes_per_weight: int) -> Network:
    """Return the layers and the head of a dense Llama-shaped policy, by its `config.json`."""
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    layer = _layer(hf_config, hidden, hidden, heads)
    return Network(hf_config["num_hidden_layers"] * layer + hidden * hf_config["vocab_size"], bytes_per_weight)


def drafter_networks(hf_config: dict[str, Any], bytes_per_weight: int) -> tuple[Network, Network]:
    """Return an EAGLE-3 drafter's layers with its head, and its `fc`; its first attention reads 2 hidden states."""
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    first, above = (_layer(hf_config, hidden, width, heads) for width in (2 * hidden, hidden))
    layers = first + (hf_config["num_hidden_layers"] - 1) * above
    network = Network(layers + hidden * hf_config["draft_vocab_size"], bytes_per_weight)
    return network, Network(len(hf_config["eagle_aux_hidden_state_layer_ids"]) * hidden * hidden, bytes_per_weight)


def _layer(hf_config: dict[str, Any], hidden: int, attention_input: int, heads: int) -> int:
    head_dim = hf_config.get("head_dim") or hidden // heads
    kv_heads = hf_config.get("num_key_value_heads") or heads
    attention = attention_input * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    return int(attention + 3 * hidden * hf_config["intermediate_size"])
