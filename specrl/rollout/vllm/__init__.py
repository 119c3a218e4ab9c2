"""All that reaches into vLLM, and the only place that imports it: its sampler replaced, drafts of several sources, k
changed while running, weights loaded in place, FP8 layers, sleep.

Written against one vLLM version and its V1 model runner (`lifecycle.VLLM_VERSION`). On another version
`lifecycle.require_version` says so, because everything here names attributes that vLLM does not promise to keep.
"""
