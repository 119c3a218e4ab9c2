"""The experts that each token of the policy was sent to, captured while the engine computes.

vLLM's own option for this (`enable_return_routed_experts`) needs its second model runner. Here the experts of a token
are kept at the token's slot of the KV cache. So they live and die with its keys and values: a prompt that another
request has computed brings its experts along, a token that is computed again after a preemption overwrites its own, and
so does the token that takes the place of a rejected draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray

from specrl.models.families import EXPERTS_IN_A_BYTE

FIRST_ATTENTION = "model.layers.0.self_attn.attn"
"""The name of the policy's first attention layer inside the engine."""


class Routes:
    """The experts of every token in the KV cache of one rank's engine."""

    def __init__(self, runner: Any, capturer: Any) -> None:
        """Make room for as many tokens as the KV cache has.

        Args:
            runner: The V1 model runner, after its KV cache was made.
            capturer: vLLM's `RoutedExpertsCapturer`, which the routers of the model write to.
        """
        self._runner, self._capturer = runner, capturer
        groups = runner.kv_cache_config.kv_cache_groups
        (self._group,) = (index for index, group in enumerate(groups) if FIRST_ATTENTION in group.layer_names)
        self._block_size: int = groups[self._group].kv_cache_spec.block_size
        num_slots = runner.kv_cache_config.num_blocks * self._block_size
        few = runner.model_config.get_num_experts() <= EXPERTS_IN_A_BYTE
        self._kept = torch.zeros(
            (num_slots, *capturer.shape_per_token), dtype=torch.uint8 if few else torch.int16, device=runner.device
        )
        """[slots, layers, experts per token]"""

    def keep(self) -> None:
        """Keep the experts of the tokens that the engine has computed last; their drafts may still be rejected."""
        batch = self._runner.input_batch
        count = int(self._runner.query_start_loc.np[len(batch.req_ids)])
        slots = batch.block_table[self._group].slot_mapping.gpu[:count]
        self._kept[slots] = self._capturer.device_buffer[:count].to(self._kept.dtype)

    def of(self, request_id: str, num_tokens: int) -> NDArray[Any]:
        """Return the experts of a request's first tokens, [num_tokens, layers, experts per token].

        The request must have been part of the last iteration, though it may be finished, and these tokens must have
        been computed: the last token of a response is not.

        Args:
            request_id: The engine's own id of the request.
        """
        blocks = torch.tensor(self._runner.requests[request_id].block_ids[self._group])
        positions = torch.arange(num_tokens)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        found: NDArray[Any] = self._kept[slots.to(self._kept.device)].cpu().numpy()
        assert num_tokens == len(found)
        return found


@contextmanager
def captured_from_the_start() -> Iterator[None]:
    """Let the routers of engines that start inside the block write down which experts they choose.

    The capture is in place before CUDA graphs are recorded, or it would not be part of them.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.initialize_kv_cache

    def initialize(runner: Any, *args: Any, **kwargs: Any) -> None:
        original(runner, *args, **kwargs)
        runner.specrl_routes = _attached(runner)

    GPUModelRunner.initialize_kv_cache = initialize
    try:
        yield
    finally:
        GPUModelRunner.initialize_kv_cache = original


def _attached(runner: Any) -> Routes:
    """Bind a capturer to the routers of the runner's model and return where its findings are kept."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )

    rows = max(runner.max_num_tokens, runner.vllm_config.compilation_config.max_cudagraph_capture_size or 0)
    capturer = RoutedExpertsCapturer(rows, runner.vllm_config)
    bind_routed_experts_capturer(runner.model, capturer)
    return Routes(runner, capturer)


def routes_of(runner: Any) -> Routes | None:
    """Return the routes of an engine that was started inside `captured_from_the_start`; None for any other."""
    routes: Routes | None = getattr(runner, "specrl_routes", None)
    return routes
