"""The checkpoints of a run: saved, kept, found again.

A checkpoint is a folder step_00000100 that appears by rename, after every file of
step_00000100.tmp-<attempt> is on the disk and listed with its checksum. Two phases: all ranks make
their files durable and hand over what they wrote, then the first one writes the manifest and gives
the folder its name. Tensors go by their names, so they load into another mesh.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

from torch import Tensor

from trainer import faults, phase
from trainer.checkpoint.errors import DamagedCheckpointsError
from trainer.checkpoint.folders import finished, none_is_whole, remove, step_folder
from trainer.checkpoint.manifest import damage, entry_of, write_manifest
from trainer.checkpoint.reading import read_tensors
from trainer.checkpoint.shards import Shard, shards_of
from trainer.checkpoint.space import require_memory, require_space
from trainer.checkpoint.staging import BackgroundSave, StagedSource
from trainer.checkpoint.writing import SLICE_BYTES, LiveSource, Source, write_tensors
from trainer.disk import agreed_writes, sync_folder
from trainer.ranks import Ranks
from trainer.state import TrainState

_NUMBER = count()


class Checkpoints:
    """The checkpoints of one run; all ranks call every method together.

    keep: how many whole ones stay. attempt: names the temporary folder, so that what an attempt
    leaves behind when it is killed is never taken for another's. staging: bytes of host memory on
    each rank for saves in the background, None when there are none. Raises DiskError when the
    folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        attempt: int,
        ranks: Ranks,
        say: Callable[[str], None],
        staging: int | None = None,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._attempt = attempt
        self._ranks = ranks
        self._say = say
        self._staging = staging
        self._slice_bytes = slice_bytes
        self._plan_key = f"checkpoints {next(_NUMBER)} of this process"
        self._whole: set[Path] = set()  # written or verified by this process
        self._damaged: set[Path] = set()
        self._in_flight: BackgroundSave | None = None
        # A thread's collectives must not mix with those of training.
        self._apart = ranks if staging is None else ranks.apart()
        with self._agreed("making the checkpoint folder", ranks):
            if ranks.first:
                folder.mkdir(parents=True, exist_ok=True)
                for leftover in folder.glob("step_*.tmp-*"):
                    shutil.rmtree(leftover)

    @property
    def saving(self) -> bool:
        """Whether a save in the background has not been settled."""
        return self._in_flight is not None

    def all(self) -> list[Path]:
        """Folders of finished saves, oldest first, whole or not."""
        return finished(self.folder)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return step_folder(self.folder, step)

    def check_space(self, tensors: Mapping[str, Tensor], *, saves: int) -> None:
        """Raise DiskError unless `saves` checkpoints, of which `keep` stay, fit on the disk, and
        ValueError unless their copies fit in memory.

        A new one is written before an old one goes, hence one more than `keep`.
        """
        shards = shards_of(tensors)
        most = min(saves, self._keep + 1)
        require_space(self.folder, shards, most, ranks=self._ranks, slice_bytes=self._slice_bytes)
        if self._staging is not None and saves > 1:
            require_memory(shards, limit=self._staging, ranks=self._ranks)

    def save(self, tensors: Mapping[str, Tensor], state: TrainState, *, wait: bool = True) -> None:
        """Write the checkpoint of state.step, then remove the oldest ones past `keep`.

        An earlier save is waited for first. Without `wait`, and with staging, this returns when
        the tensors may change again; `settle` tells of the rest. On any failure the temporary
        folder is removed, older checkpoints stay as they are, and DiskError says what the disk did.
        NotFiniteError for values that nobody should resume from.
        """
        self.settle(wait=True)
        shards = shards_of(tensors)
        if wait or self._staging is None:
            self._write(shards, LiveSource(shards), state, self._ranks)
            return
        source = StagedSource(shards, limit=self._staging)
        self._in_flight = BackgroundSave(
            state.step, source, lambda: self._write(shards, source, state, self._apart)
        )
        self._in_flight.start()
        source.stage()
        faults.reach("save.staged", {"step": state.step, "rank": self._ranks.rank})

    def settle(self, *, wait: bool = False) -> int | None:
        """At a step's border: the step of a save in the background that has just been finished.

        wait: let it finish. Raises, on all ranks, what made it fail on any.
        """
        save = self._in_flight
        if save is None:
            return None
        if wait:
            save.join()
        if not wait and self._ranks.any(not save.finished):
            return None
        self._in_flight = None
        if save.error is not None:  # then all ranks have one: they agreed on it
            raise save.error
        return save.step

    def close(self) -> int | None:
        """Let a save in the background finish, whatever else went wrong; its step if it stands.

        No collective: the ranks' threads finish together even if the ranks end differently.
        """
        save, self._in_flight = self._in_flight, None
        if save is None:
            return None
        save.join()
        if save.error is None:
            return save.step
        self._say(f"step {save.step}: not saved: {save.error}")
        return None

    def newest(self) -> Path | None:
        """The newest whole checkpoint; None when there is none at all. The ranks share the reading.

        Damaged ones that are newer are reported and set aside under another name. Raises
        DamagedCheckpointsError when there are checkpoints and none is whole.
        """
        bad: dict[Path, list[str]] = {}
        for path in reversed(self._ranks.from_first(self.all())):
            share = self._ranks.rank, self._ranks.world
            mine = damage(path, share=share, read=lambda size: phase.tick())
            problems = [p for part in self._ranks.all_gather_objects(mine) for p in part]
            if not problems:
                break
            bad[path] = list(dict.fromkeys(problems))
        else:
            if bad:
                every = [problem for problems in bad.values() for problem in problems]
                raise DamagedCheckpointsError(none_is_whole(every))
            return None
        self._whole.add(path)
        with self._agreed("setting damaged checkpoints aside", self._ranks):
            if self._ranks.first:
                for damaged, problems in bad.items():
                    self._set_aside(damaged, problems)
        return path

    def load(self, folder: Path, tensors: Mapping[str, Tensor]) -> TrainState:
        """Fill `tensors` in place from a whole checkpoint and return its trainer state.

        Raises ValueError when names, shapes or dtypes differ from what was saved.
        """
        with self._agreed(f"reading {folder.name}", self._ranks):
            read_tensors(folder, tensors, whole=True)
        return TrainState.read(folder)

    def _write(
        self, shards: Mapping[str, Shard], source: Source, state: TrainState, ranks: Ranks
    ) -> None:
        final = self.path(state.step)
        temporary = final.with_name(f"{final.name}.tmp-{self._attempt:03d}")
        doing, here = f"saving step {state.step}", {"step": state.step, "rank": ranks.rank}
        try:
            with self._agreed(doing, ranks):
                if ranks.first:
                    temporary.mkdir()
                    faults.reach("save.folder", here)
            with self._agreed(doing, ranks):
                mine = write_tensors(
                    temporary,
                    shards,
                    source,
                    step=state.step,
                    ranks=ranks,
                    slice_bytes=self._slice_bytes,
                    plan_key=self._plan_key,
                )
                faults.reach("save.tensors", here, folder=temporary)
            written = ranks.all_gather_objects(mine)
            with self._agreed(doing, ranks):
                if ranks.first:
                    entries = {name: entry for part in written for name, entry in part.items()}
                    faults.reach("save.manifest", here)
                    file = state.write(temporary)
                    write_manifest(temporary, entries | {file.name: entry_of(file)})
                    faults.reach("save.rename", here)
                    temporary.rename(final)
                    sync_folder(self.folder)
        except BaseException:
            if ranks.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._whole.add(final)
        with self._agreed(doing, ranks):
            if ranks.first:
                faults.reach("save.renamed", here, folder=final)
                self._retire(**here)

    def _retire(self, **here: int) -> None:
        """Keep the newest `keep` whole checkpoints; what is damaged neither counts nor goes."""
        whole = 0
        for path in reversed(self.all()):
            if whole >= self._keep:
                if path not in self._damaged and not damage(path, contents=False):
                    remove(path, **here)
            elif self._is_whole(path):
                whole += 1

    def _is_whole(self, path: Path) -> bool:
        if path not in self._whole | self._damaged:
            (self._damaged if damage(path) else self._whole).add(path)
        return path in self._whole

    def _set_aside(self, path: Path, problems: list[str]) -> None:
        aside = path.with_name(f"{path.name}.damaged-{self._attempt:03d}")
        path.rename(aside)
        self._say(f"Checkpoint {path.name} is damaged and was set aside as {aside.name}:")
        for problem in problems:
            self._say(f"  {problem}")

    def _agreed(self, doing: str, ranks: Ranks) -> AbstractContextManager[None]:
        return agreed_writes(ranks, doing=doing, path=self.folder)
