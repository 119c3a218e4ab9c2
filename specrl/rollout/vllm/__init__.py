"""Everything that reaches into vLLM, and the only package that imports it.

It replaces the sampler and the verification of vLLM's second model runner, changes the draft length while the engine
runs, loads weights in place, and adds FP8 layers and sleep. It names attributes that vLLM does not promise to keep
(`replacements` lists those that it replaces), so it is written for one version; on any other
`engine.lifecycle.require_version` refuses to start.
"""

import specrl.rollout.vllm.cpu_kernels  # noqa: F401  (must precede vllm)
