"""A checkpoint written while training goes on, out of a bounded copy in host memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from trainer.checkpoint.shards import Shard
from trainer.checkpoint.writing import slice_of
from trainer.heartbeat import BACKGROUND


class StagedSource:
    """Slices copied by the training thread, taken in the same order by the writing one.

    Never more than `limit` bytes of copies exist, or one slice if that is larger: training waits in
    `stage` until the rest of this rank's share is on its way to the disk. So a buffer as large as
    the share costs a copy, and a smaller one costs in addition the writing of what does not fit.
    """

    def __init__(self, shards: Mapping[str, Shard], *, limit: int) -> None:
        self._shards = shards
        self._limit = limit
        self._change = threading.Condition()
        self._items: Sequence[WriteItem] | None = None
        self._copies: deque[Tensor] = deque()
        self._held = 0  # bytes, the copy being written included
        self._writing = 0
        self._stopped = False
        self._failure: BaseException | None = None

    def stage(self) -> None:
        """Copy every slice; return when the tensors may change again, or nobody wants them."""
        try:
            for item in self._wait_for_plan():
                data = slice_of(self._shards, item)
                if not self._wait_for_room(data.nbytes):
                    return
                copy = _host_copy(data)
                with self._change:
                    self._copies.append(copy)
                    self._change.notify_all()
        except BaseException as error:
            with self._change:
                self._failure = error
                self._change.notify_all()
            if not isinstance(error, Exception):  # the writing thread makes the ranks agree on it
                raise

    def planned(self, items: Sequence[WriteItem]) -> None:
        with self._change:
            self._items = items
            self._change.notify_all()

    def data(self, item: WriteItem) -> Tensor:
        with self._change:
            self._held -= self._writing
            self._writing = 0
            self._change.notify_all()
            self._change.wait_for(lambda: self._copies or self._failure)
            if self._failure is not None:
                raise self._failure
            copy = self._copies.popleft()
            self._writing = copy.nbytes
            return copy

    def stop(self) -> None:
        """Nothing more will be taken, for better or worse."""
        with self._change:
            self._stopped = True
            self._copies.clear()
            self._change.notify_all()

    def _wait_for_plan(self) -> Sequence[WriteItem]:
        with self._change:
            self._change.wait_for(lambda: self._items is not None or self._stopped)
            return self._items or ()

    def _wait_for_room(self, size: int) -> bool:
        with self._change:
            self._change.wait_for(
                lambda: self._stopped or not self._held or self._held + size <= self._limit
            )
            self._held += size
            return not self._stopped


class BackgroundSave(threading.Thread):
    """`write(source)` in a thread of its own. `error`: why it failed, once it is `finished`."""

    def __init__(self, step: int, source: StagedSource, write: Callable[[], None]) -> None:
        super().__init__(name=f"{BACKGROUND}{step}", daemon=True)
        self.step = step
        self.error: BaseException | None = None
        self._source = source
        self._write = write

    @property
    def finished(self) -> bool:
        return not self.is_alive()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error
        finally:
            self._source.stop()


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where a device copies faster into such."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
