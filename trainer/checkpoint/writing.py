"""Tensors into the files of a checkpoint, through torch.distributed.checkpoint.

Each rank writes one file. What several ranks hold is written by one of them, so that the files
come out even. A tensor larger than SLICE_BYTES is written in slices: whoever loads it, into
whatever mesh, needs the memory of his own part and one slice.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _compare_save_plans
from torch.distributed.checkpoint.state_dict_saver import save

from trainer import faults, phase
from trainer.checkpoint.errors import NotFiniteError
from trainer.checkpoint.manifest import FileEntry
from trainer.checkpoint.shards import Shard
from trainer.ranks import Ranks

SLICE_BYTES = 64 << 20


class Source(Protocol):
    """Where the writer gets this rank's slices."""

    def planned(self, items: Sequence[WriteItem]) -> None:
        """These, and no others, will be asked for, in this order."""
        ...

    def data(self, item: WriteItem) -> Tensor:
        """The slice, in host or device memory, as it was at the step that is saved."""
        ...


class LiveSource:
    """Slices of the tensors themselves, which nobody changes while they are written."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards

    def planned(self, items: Sequence[WriteItem]) -> None:
        pass

    def data(self, item: WriteItem) -> Tensor:
        return _alone(slice_of(self._shards, item))


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that has no more than its own: torch's writer would copy what is
    part of a larger one."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    flat = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)


def slice_of(shards: Mapping[str, Shard], item: WriteItem) -> Tensor:
    """The live data that `item` is to hold."""
    shard = shards[item.index.fqn]
    assert item.index.offset is not None and item.tensor_data is not None
    if not shard.local.dim():
        return shard.local
    first = item.index.offset[0] - shard.offsets[0]
    return shard.local.narrow(0, first, item.tensor_data.chunk.sizes[0])


def write_tensors(
    folder: Path,
    shards: Mapping[str, Shard],
    source: Source,
    *,
    step: int,
    ranks: Ranks,
    slice_bytes: int = SLICE_BYTES,
    plan_key: str = "",
) -> dict[str, FileEntry]:
    """Write this rank's part of a checkpoint, durably; all ranks call it together.

    plan_key: names saves of this process that are cut alike on all ranks: they are planned once,
    for that takes the first rank about 0.1 ms for each slice of each rank.

    Returns the entries of the files that this rank wrote, hashed as they were written. Raises what
    went wrong on this rank; when that happened on another, returns: the ranks are to agree on
    failure next. A value that is not finite is NotFiniteError, whatever holds it.
    """
    files = _HashedFiles()
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.fs = files
    planner = _Planner(
        shards, source, step=step, rank=ranks.rank, slice_bytes=slice_bytes, plan_key=plan_key
    )
    try:
        silence_remark()
        save(
            {},
            storage_writer=writer,
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.world == 1,
        )
    except CheckpointException as failure:
        if ranks.rank in failure.failures:
            raise cause(failure.failures[ranks.rank][0]) from failure
    return {path.relative_to(folder).as_posix(): entry for path, entry in files.entries.items()}


class _Planner(DefaultSavePlanner):
    """Which slices there are; torch's planner chooses who writes what several ranks hold."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        source: Source,
        *,
        step: int,
        rank: int,
        slice_bytes: int,
        plan_key: str = "",
    ) -> None:
        super().__init__(
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            enable_plan_caching=bool(plan_key),
        )
        self._cached_plans_key = plan_key
        self._shards = shards
        self._source = source
        self._slice_bytes = slice_bytes
        self._known = {"step": step, "rank": rank}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, shard in self._shards.items():
            properties = TensorProperties.create_from_tensor(shard.local)
            for first, rows in shard.slices(self._slice_bytes):
                offsets, sizes = list(shard.offsets), list(shard.local.shape)
                if sizes:
                    offsets[0] += first
                    sizes[0] = rows
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, properties, torch.Size(shard.size))
                index = MetadataIndex(name, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        if self._enable_plan_caching:
            known = SavePlanner._cached_save_plan.get(self._cached_plans_key)
            if known is not None and _compare_save_plans(self.plan, known):
                return SavePlan([], usable=False)
            self._pending_local_plan = self.plan
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._source.planned(plan.items)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        faults.reach("save.slice", self._known)
        phase.tick()
        data = self._source.data(write_item)
        if data.is_floating_point() and data.numel():
            low, high = torch.aminmax(data)  # both NaN if any value is
            if not (low.isfinite() and high.isfinite()):
                raise NotFiniteError(
                    f"{write_item.index.fqn} is not finite after step {self._known['step']}"
                )
        return data


class _HashedFiles(FileSystem):
    """Files whose checksum is taken from what is written, so that nobody has to read them again."""

    def __init__(self) -> None:
        self.entries: dict[Path, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with Path(path).open(mode) as file:
            hashed = _HashedFile(file)
            yield hashed
        self.entries[Path(path)] = FileEntry(hashed.size, hashed.sha256.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path)] = self.entries.pop(Path(path))


class _HashedFile:
    """A file that is only ever appended to."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self.sha256.update(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def cause(error: BaseException) -> BaseException:
    """What a person should hear of: torch's zip writer hides an OSError, and what a source raised,
    as the context of another error."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError | NotFiniteError | faults.FaultError):
            return found
        found = found.__cause__ or found.__context__
    return error


def silence_remark() -> None:
    """No more of torch's remark that a save without a process group comes from one process.

    For good: a filter for a while would, in this thread, mix up those of the training thread.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
