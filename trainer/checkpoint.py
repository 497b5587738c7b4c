"""Checkpoints that exist whole or not at all.

A checkpoint is a folder step_00000100 that appears by rename, after every file of
step_00000100.tmp-<attempt> is on the disk and listed with its checksum. Tensors go through
torch.distributed.checkpoint under their names, so they load into another number of ranks.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.disk import (
    DiskError,
    agreed_writes,
    describe_disk,
    megabytes,
    nearest_existing,
    sync_folder,
)
from trainer.manifest import damage, write_manifest
from trainer.ranks import Ranks
from trainer.state import TrainState

TENSOR_OVERHEAD = 2048  # bytes of container and index for each tensor, rounded up
_STEP = re.compile(r"step_(\d{8})")


class DamagedCheckpointsError(Exception):
    """A run has checkpoints, and none of them is whole; the message names the bad files."""


class Checkpoints:
    """The checkpoints of one run; all ranks call every method together.

    keep: how many whole ones stay. attempt: names the temporary folder, so that what an attempt
    leaves behind when it is killed is never taken for another's. Raises DiskError when the folder
    cannot be made.
    """

    def __init__(
        self, folder: Path, *, keep: int, attempt: int, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._attempt = attempt
        self._ranks = ranks
        self._say = say
        self._whole: set[Path] = set()  # verified by this process
        with self._agreed("making the checkpoint folder"):
            if ranks.first:
                folder.mkdir(parents=True, exist_ok=True)
                for leftover in folder.glob("step_*.tmp-*"):
                    shutil.rmtree(leftover)

    def all(self) -> list[Path]:
        """Folders of finished saves, oldest first, whole or not."""
        return _finished(self.folder)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / f"step_{step:08d}"

    def check_space(self, tensors: Mapping[str, Tensor], *, saves: int) -> None:
        """Raise DiskError unless `saves` checkpoints, of which `keep` stay, fit on the disk.

        A new one is written before an old one goes, hence one more than `keep`.
        """
        message = ""
        if self._ranks.first:
            present = sum(f.stat().st_size for p in self.all() for f in p.rglob("*"))
            needed = min(saves, self._keep + 1) * stored_bytes(tensors) - present
            if needed > shutil.disk_usage(nearest_existing(self.folder)).free:
                message = (
                    f"Checkpoints need {megabytes(needed)} more, but {describe_disk(self.folder)}. "
                    "Free space there, choose another runs_dir, or lower checkpoint.keep."
                )
        if message := self._ranks.from_first(message):
            raise DiskError(message, full=True)

    def save(
        self, tensors: Mapping[str, Tensor], state: TrainState, *, before_rename: Callable[[], None]
    ) -> Path:
        """Write the checkpoint of state.step, then remove the oldest ones past `keep`.

        before_rename is called when all is on disk and the checkpoint not yet visible. On any
        failure the temporary folder is removed, older checkpoints stay as they are, and DiskError
        says what the disk did.
        """
        final = self.path(state.step)
        temporary = final.with_name(f"{final.name}.tmp-{self._attempt:03d}")
        doing = f"saving step {state.step}"
        try:
            with self._agreed(doing):
                if self._ranks.first:
                    temporary.mkdir()
            with self._agreed(doing):
                _save_tensors(temporary, tensors, one_rank=self._ranks.world == 1)
            with self._agreed(doing):
                if self._ranks.first:
                    state.write(temporary)
                    write_manifest(temporary)
                    before_rename()
                    temporary.rename(final)
                    sync_folder(self.folder)
        except BaseException:
            if self._ranks.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._whole.add(final)
        with self._agreed(doing):
            if self._ranks.first:
                self._retire()
        return final

    def newest(self) -> Path | None:
        """The newest whole checkpoint; None when there is none at all.

        Damaged ones that are newer are reported and set aside under another name. Raises
        DamagedCheckpointsError when there are checkpoints and none is whole.
        """
        found: tuple[Path | None, str] = (None, "")
        if self._ranks.first:
            found = self._newest()
        path, report = self._ranks.from_first(found)
        if path is None and report:
            raise DamagedCheckpointsError(report)
        return path

    def load(self, folder: Path, tensors: Mapping[str, Tensor]) -> TrainState:
        """Fill `tensors` in place from a whole checkpoint and return its trainer state.

        Raises ValueError when names, shapes or dtypes differ from what was saved.
        """
        read_tensors(folder, tensors, whole=True, one_rank=self._ranks.world == 1)
        return TrainState.read(folder)

    def _newest(self) -> tuple[Path | None, str]:
        bad: dict[Path, list[str]] = {}
        for path in reversed(self.all()):
            if not (problems := damage(path)):
                break
            bad[path] = problems
        else:
            every = [problem for problems in bad.values() for problem in problems]
            return None, _none_is_whole(every) if bad else ""
        self._whole.add(path)
        for damaged, problems in bad.items():
            aside = damaged.with_name(f"{damaged.name}.damaged-{self._attempt:03d}")
            damaged.rename(aside)
            self._say(f"Checkpoint {damaged.name} is damaged and was set aside as {aside.name}:")
            for problem in problems:
                self._say(f"  {problem}")
        return path, ""

    def _retire(self) -> None:
        """Keep the newest `keep` whole checkpoints; what is damaged neither counts nor goes."""
        whole = []
        for path in reversed(self.all()):
            if path in self._whole or not damage(path):
                self._whole.add(path)
                whole.append(path)
        for path in whole[self._keep :]:
            leaving = path.with_name(f"{path.name}.tmp-removed")
            path.rename(leaving)
            shutil.rmtree(leaving)

    def _agreed(self, doing: str) -> AbstractContextManager[None]:
        return agreed_writes(self._ranks, doing=doing, path=self.folder)


def newest_whole(folder: Path) -> Path | None:
    """The newest whole checkpoint in a run's checkpoint folder, for those who only read.

    None when there is none at all. Raises DamagedCheckpointsError when there are some and none is
    whole. Reads every byte of the newest.
    """
    bad = []
    for path in reversed(_finished(folder)):
        if not (problems := damage(path)):
            return path
        bad += problems
    if bad:
        raise DamagedCheckpointsError(_none_is_whole(bad))
    return None


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
    checkpoint: Path | CheckpointReader,
    tensors: Mapping[str, Tensor],
    *,
    whole: bool,
    one_rank: bool,
) -> None:
    """Fill `tensors` in place from a whole checkpoint; with `whole` it must hold no others.

    Raises ValueError when names, shapes or dtypes differ from what was saved.
    """
    reader = CheckpointReader(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    saved = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    names = saved.keys() | wanted.keys() if whole else wanted.keys()
    if different := sorted(n for n in names if saved.get(n) != wanted.get(n)):
        listed = ", ".join(different[:5]) + (", ..." if len(different) > 5 else "")
        raise ValueError(
            f"{reader.folder} holds another model or optimiser: {len(different)} of {len(wanted)} "
            f"tensors differ in name, shape or dtype ({listed}). Use the configuration that wrote "
            "it."
        )
    with _quiet():
        load(dict(tensors), storage_reader=reader, no_dist=one_rank)


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that the tensors take on disk, each counted whole however it is sharded."""
    return sum(t.numel() * t.element_size() + TENSOR_OVERHEAD for t in tensors.values())


def _finished(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and _STEP.fullmatch(p.name))


def _none_is_whole(problems: Sequence[str]) -> str:
    report = "No checkpoint of this run is whole; restore a file or start a new run:"
    return "\n".join([report, *(f"  {problem}" for problem in problems)])


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor], *, one_rank: bool) -> None:
    try:
        with _quiet():
            save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=one_rank)
    except CheckpointException as failure:
        raise _os_error(failure) or RuntimeError(str(failure)) from failure


def _os_error(failure: CheckpointException) -> OSError | None:
    """The OSError behind a failed save: torch's zip writer hides it as the context of another."""
    for error, _ in failure.failures.values():
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            return cause
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a save without a process group comes from one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
