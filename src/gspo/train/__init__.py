"""The training step, the loop around it, and the cold start."""
