"""Drafts inside the engine: which requests get one and how long it is, and records of what was drafted and sampled."""
