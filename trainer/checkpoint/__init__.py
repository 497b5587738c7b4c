"""Checkpoints that exist whole or not at all, and load into any number of ranks."""
