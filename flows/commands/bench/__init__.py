"""`specrl bench`: its sub-commands, and benchmarks as jobs."""
