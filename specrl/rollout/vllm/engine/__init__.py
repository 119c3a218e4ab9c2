"""The in-process engine: the arguments that it is started with, its life, and what is replaced in vLLM to run it."""
