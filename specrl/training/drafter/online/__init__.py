"""What the drafter learns during RL: its update in each step, the rate of it, and training on ranks that are idle."""
