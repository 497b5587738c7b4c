"""What a training run has left, for tests that compare runs."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from trainer.checkpoint.store import Checkpoints
from trainer.config import TrainerConfig
from trainer.learner import build_learner
from trainer.ranks import Ranks


def weights(config: TrainerConfig, run_dir: Path) -> dict[str, Tensor]:
    """Model and tables of the last checkpoint, loaded on one rank whoever wrote it."""
    tensors = build_learner(config).tensors()
    checkpoints = Checkpoints(
        run_dir / "checkpoints", keep=1, attempt=9, ranks=Ranks(), say=lambda text: None
    )
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest, tensors)
    return {n: t for n, t in tensors.items() if n.startswith(("model/", "tables/"))}
