"""The weights inside the engine: loaded in place at a refit, and compared with the trainer's tensors."""
