"""vLLM's OpenAI server with a policy and its drafter.

What it samples is vLLM's own choice: the server has none of the sampler, control and seeds of `VllmEngine`.
"""
