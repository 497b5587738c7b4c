"""What one rank does: steps, optimisers, checkpoints, metrics, signals."""
