"""A run's starting weights: out of a folder of safetensors, each rank its own share."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from data.errors import DataError
from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.engram.store import RowStore
from model.parallel.held import held_part
from model.released.audit import unread_by
from model.released.errors import WeightsError
from model.released.load import Progress, Target, load_folder, tables_of
from trainer.ranks import Ranks


def load_weights(
    config: ModelConfig, model: nn.Module, store: RowStore, *, ranks: Ranks, progress: Progress
) -> None:
    """Fill the model, and the tables that it holds in memory, from the folder config.weights.

    Every rank reads the rows that it holds and no others; beside the model it takes the memory of
    one slice. DataError, on every rank, lists all that is wrong with the folder.
    """
    error: DataError | None = None
    try:
        _load(config, model, store, progress=progress)
    except WeightsError as found:
        error = DataError(str(found))
    if ranks.any(error is not None):
        raise error or DataError("Another rank could not read its weights; see its log.")


def _load(config: ModelConfig, model: nn.Module, store: RowStore, *, progress: Progress) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    targets = [_target(name, tensor) for name, tensor in named]
    tables = tables_of(store) if isinstance(store, OwnerStore) else []
    unread = unread_by(config, tables=isinstance(store, OwnerStore))
    load_folder(Path(config.weights), targets + tables, unread=unread, progress=progress)


def _target(name: str, tensor: Tensor) -> Target:
    part, offset = held_part(tensor)
    return Target(name, part, tuple(tensor.shape), offset)
