"""vLLM's OpenAI server with a policy and its drafter.

It samples as vLLM does: the server does not use the sampler, draft-length control and seeds of `VllmEngine`.
"""
