"""Sleep and wake-up of an engine on a GPU: between rollouts its memory is the trainer's.

Reaches into vLLM 0.32.0 (the engine calls `vllm_patch.require_version` when it starts).
"""

from __future__ import annotations

import torch

from specrl.rollout.engine import Engine

OFFLOAD = 1
"""vLLM's level that copies weights to the CPU. The other one drops them, and with them what no refit brings: buffers of
the drafter, scales, whatever a later vLLM keeps beside the weights."""


def sleep(engine: Engine) -> None:
    """Give the memory back; only `wake` may follow.

    Raises:
        ValueError: vLLM cannot sleep here, which is everywhere but on GPUs and with `engine.sleep = true`.
    """
    if not engine._llm.model_config.enable_sleep_mode:
        raise ValueError("the engine cannot sleep: it was started on a CPU or without engine.sleep = true")
    assert not engine._llm.has_unfinished_requests(), "sleep while generating"
    engine._llm.sleep(OFFLOAD)


def wake(engine: Engine) -> None:
    """The weights are back, for a refit to replace, and the KV cache is empty. An engine that is awake stays so."""
    if engine._llm.model_config.enable_sleep_mode and engine._llm.is_sleeping():
        torch.cuda.empty_cache()  # what the trainer has freed, but torch keeps
        engine._llm.wake_up()
