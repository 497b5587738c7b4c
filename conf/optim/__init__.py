"""The optimiser and its schedule."""
