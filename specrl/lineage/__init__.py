"""Where a run's results come from: its code, its stages' keys, and the checkpoint that its training continues."""
