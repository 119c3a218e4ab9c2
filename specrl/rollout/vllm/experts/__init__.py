"""What a mixture of experts needs inside the engine: weights at a refit, and the experts that tokens are sent to."""
