"""What can be wrong with checkpoints, apart from the disk."""

from __future__ import annotations


class DamagedCheckpointsError(Exception):
    """A run has checkpoints, and none of them is whole; the message names the bad files."""


class NotFiniteError(Exception):
    """A tensor to be saved holds a value that is not finite; the message names it and the step."""
