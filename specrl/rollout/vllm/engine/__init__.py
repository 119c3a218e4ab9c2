"""In-process vLLM engines: how they are started, used and stopped. To be imported before vLLM."""

import specrl.rollout.vllm.cpu_kernels  # noqa: F401  (must precede vllm)
