"""In-process vLLM engines: how they are started, used and stopped."""
