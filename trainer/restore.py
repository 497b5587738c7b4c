"""A run's model as one of its checkpoints has it, for those who only read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from model.engram.store import RowStore
from model.transformer import DeepseekV41
from trainer.checkpoint import read_tensors
from trainer.config import ParallelConfig, TrainerConfig
from trainer.learner import build_model, build_store, weights_by_name
from trainer.state import TrainState


def restored_model(config: TrainerConfig, folder: Path) -> tuple[DeepseekV41, RowStore, TrainState]:
    """Model and tables of the whole checkpoint `folder`, in this process alone.

    However many ranks wrote it. DataError for mapped tables that are not those it was trained
    with; ValueError when they cannot be read, or the configuration is not the checkpoint's.
    """
    alone = replace(config, parallel=ParallelConfig())
    model, store = build_model(alone, scratch=False), build_store(alone, scratch=False)
    read_tensors(folder, weights_by_name(model, store), whole=False, one_rank=True)
    state = TrainState.read(folder)
    state.require_same_tables(store.fingerprint(), folder=folder)
    return model, store, state
