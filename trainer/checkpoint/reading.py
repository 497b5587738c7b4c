"""Tensors out of the files of a checkpoint, into whatever mesh there is now."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint.errors import DamagedCheckpointsError
from trainer.checkpoint.shards import Shard, shards_of
from trainer.checkpoint.writing import cause, silence_remark


class CheckpointReader(FileSystemReader):
    """Reads the list of what a checkpoint holds once, not for every call that reads from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def read_tensors(
    checkpoint: Path | CheckpointReader, tensors: Mapping[str, Tensor], *, whole: bool
) -> None:
    """Fill `tensors`, or this rank's parts of them, in place from a whole checkpoint; with `whole`
    it must hold no others.

    Each rank reads for itself, what it needs and no more than a slice at a time besides. Raises
    ValueError when names, shapes or dtypes differ from what was saved, before anything is read;
    DamagedCheckpointsError when the files cannot be read.
    """
    reader = CheckpointReader(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    try:
        saved = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except OSError as error:
        raise _unreadable(reader, error) from error
    wanted = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    names = saved.keys() | wanted.keys() if whole else wanted.keys()
    if different := sorted(n for n in names if saved.get(n) != wanted.get(n)):
        listed = ", ".join(different[:5]) + (", ..." if len(different) > 5 else "")
        raise ValueError(
            f"{reader.folder} holds another model or optimiser: {len(different)} of {len(wanted)} "
            f"tensors differ in name, shape or dtype ({listed}). Use the configuration that wrote "
            "it."
        )
    try:
        silence_remark()
        load({}, storage_reader=reader, planner=_Planner(shards_of(tensors)), no_dist=True)
    except CheckpointException as failure:
        error = cause(failure.failures[0][0])
        if isinstance(error, OSError):
            raise _unreadable(reader, error) from failure
        raise error from failure


class _Planner(LoadPlanner):
    """Which parts of which slices this rank's parts are made of."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, shard in self._shards.items():
            saved = self._saved[name]
            assert isinstance(saved, TensorStorageMetadata)
            if not shard.local.numel():
                continue
            chunk = ChunkStorageMetadata(torch.Size(shard.offsets), shard.local.shape)
            found = create_read_items_for_chunk_list(name, saved, [chunk])
            covered = sum(math.prod(item.lengths) for item in found)
            if covered != shard.local.numel():
                raise DamagedCheckpointsError(
                    f"{name} is saved in part only: {covered:,} of {shard.local.numel():,} values "
                    "are there"
                )
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._shards[read_item.dest_index.fqn].local
        for dim, (first, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, first, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _unreadable(reader: CheckpointReader, error: OSError) -> DamagedCheckpointsError:
    return DamagedCheckpointsError(
        f"{reader.folder} cannot be read: {error.strerror or error} "
        f"({error.filename or reader.folder})"
    )
