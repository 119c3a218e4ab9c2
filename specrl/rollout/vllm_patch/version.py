"""Which vLLM this package was written against."""

from __future__ import annotations

VLLM_VERSION = "0.32.0"


def require_version() -> None:
    """Raises RuntimeError when the installed vLLM is not the one this package was written against."""
    import vllm

    if vllm.__version__.split("+")[0] != VLLM_VERSION:
        raise RuntimeError(
            f"specrl replaces the sampler inside vLLM {VLLM_VERSION}, but vLLM {vllm.__version__} is installed; "
            "install the locked requirements, or port specrl/rollout/vllm_patch and run tests/exactness"
        )
