"""Prompts that several running requests have in common are read once, whatever their length.

vLLM finds cached prefixes in whole blocks only, and on CPUs a block has 32 tokens: the responses to a short prompt, a
group, would each read all of it. Here a request whose prompt another running one has read begins with that one's
blocks, and reads the last token alone. vLLM copies the block that is not full, as it does for prefixes of its own that
end inside of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SharedPrompts:
    """Takes the place of the lookup of cached prefixes in an engine's KV cache manager."""

    def __init__(self, scheduler: Any) -> None:
        self._requests = scheduler.requests
        self._manager = scheduler.kv_cache_manager
        self._lookup = self._manager.get_computed_blocks
        self._readers: dict[tuple[int, ...], str] = {}
        """The engine's id of the request that reads, or has read, a prompt."""

    def install(self) -> None:
        """Take the place of the lookup."""
        self._manager.get_computed_blocks = self

    def note(self, prompt: Sequence[int], reader: str) -> None:
        """Take note that a request, by the engine's id, was queued; the first one with a prompt is its reader."""
        self._readers.setdefault(tuple(prompt), reader)

    def must_wait(self, prompt: Sequence[int]) -> bool:
        """Return whether a request with this prompt had better be queued later: another one is about to read it."""
        reader = self._requests.get(self._readers.get(tuple(prompt), ""))
        return reader is not None and reader.num_computed_tokens < len(prompt) - 1

    def forget(self) -> None:
        """Forget who has read which prompt."""
        self._readers.clear()

    def __call__(self, request: Any) -> tuple[Any, int, int]:
        """Return the blocks that a request begins with, how many tokens they hold, and vLLM's third value."""
        manager: Any = self._manager
        found: tuple[Any, int, int] = self._lookup(request)
        prompt = tuple(request.prompt_token_ids)
        last = len(prompt) - 1  # its logits are needed, so it is read again
        reader = self._requests.get(self._readers.get(prompt, ""))
        if reader is None or reader is request:
            self._readers[prompt] = request.request_id
            return found
        is_read = reader.num_computed_tokens >= last > found[1]
        if not is_read or request.num_output_tokens or not manager.prefix_cache_lookup_enabled(request):
            return found
        held = manager.get_blocks(reader.request_id).blocks
        sizes = [group.block_size for group in manager.coordinator.single_type_managers]
        blocks = tuple(list(group)[: -(-last // size)] for group, size in zip(held, sizes, strict=True))
        return manager.create_kv_cache_blocks(blocks), last, 0


def can_share(scheduler: Any) -> bool:
    """Return whether an engine on a CPU keeps the keys and values of all tokens in every layer, as sharing needs."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    if not current_platform.is_cpu():  # a block has 16 tokens on a GPU
        return False
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    layers = [
        layer
        for spec in specs
        for layer in (spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec])
    ]
    return all(isinstance(layer, FullAttentionSpec) for layer in layers)
