"""Ranks on a Ray cluster: one that runs, or one of this machine alone for an attempt."""
