"""Sleep and wake-up of an engine on a GPU: weights and KV cache give their memory to the trainer between rollouts.

Reaches into vLLM 0.32.0 (the engine calls `vllm_patch.require_version` when it starts).
"""

from __future__ import annotations

from typing import Any

from specrl.rollout.engine import Engine
from specrl.rollout.refit import Weights

DISCARD = 2
"""vLLM's level that drops weights instead of copying them to the CPU: a refit brings new ones anyway."""


def sleep(engine: Engine) -> None:
    """Give the memory back; only `wake` may follow.

    Raises:
        ValueError: vLLM cannot sleep here, which is everywhere but on GPUs and with `enable_sleep_mode`.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_sleep_mode_available():
        raise ValueError(
            f"the engine cannot sleep on a {current_platform.device_type}: only a GPU has memory to hand over; "
            "leave engine and trainer both resident"
        )
    if not engine._llm.model_config.enable_sleep_mode:
        raise ValueError("the engine was started without enable_sleep_mode; pass overrides={'enable_sleep_mode': True}")
    assert not engine._llm.has_unfinished_requests(), "sleep while generating"
    engine._llm.sleep(DISCARD)


def wake(engine: Engine, policy_weights: Weights, drafter_weights: Weights | None, version: int, **refit: Any) -> float:
    """Wake the engine with new weights, the drafter's among them: sleep dropped both. As `Engine.refit` otherwise.

    Raises:
        ValueError: it is awake; or it has a drafter and none was sent, so that every draft would be noise.
    """
    if not engine._llm.is_sleeping():
        raise ValueError("the engine is awake; call sleep() first, or refit() to give it new weights")
    if engine._drafter is not None and drafter_weights is None:
        raise ValueError("an engine with a drafter must be woken with the drafter's weights: sleep dropped them")
    engine._llm.wake_up()
    return engine.refit(policy_weights, drafter_weights, version, **refit)
