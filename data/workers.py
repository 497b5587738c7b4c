"""Worker processes that prepare batches ahead: started, watched, stopped."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.batch import Batch
from data.errors import CacheError, DataError, WorkerDiedError
from data.processes import deaf_children, set_up_child
from data.shipment import Shipment

BATCHES_AHEAD = 2  # of each worker
STOP_SECONDS = 5.0
DYING_SECONDS = 1.0


class BatchSource(Protocol):
    """Batches by number; sent to every worker."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Batch: ...

    def describe(self, number: int) -> str:
        """What a batch is made of, in words."""
        ...


def in_workers(source: BatchSource, workers: int, *, pin: bool) -> Generator[Batch, None, None]:
    """All batches of the source in their order, prepared ahead by processes that start at once.

    They are stopped when the generator is closed or dropped, or this process ends. Signals that
    stop a run do not reach them. DataError as the source raises it; WorkerDiedError when a worker
    has died and a batch is asked for.
    """
    stream = _Stream(source, min(workers, len(source)), pin=pin)
    # A process that ends with the stream open would wait for its workers for ever: the exit
    # handler of multiprocessing stops them by SIGTERM, which they ignore. Ours runs before it.
    atexit.register(_stop, weakref.ref(stream))
    return stream.batches()


class _Dead(Exception):
    """A worker is dead: on its way out of torch's iterator, which may turn it into another."""


class _Stream:
    """A loader's iterator and what is known of its workers."""

    def __init__(self, source: BatchSource, workers: int, *, pin: bool) -> None:
        self._source = source
        self._doing = RawArray("q", [-1] * workers)
        self._pids = RawArray("q", workers)
        loader = DataLoader(
            _Watched(source, self._doing, self._pids),
            batch_size=None,
            collate_fn=_as_is,
            num_workers=workers,
            prefetch_factor=BATCHES_AHEAD,
            pin_memory=pin,
            multiprocessing_context="spawn",
            worker_init_fn=_set_up_worker,
            generator=torch.Generator(),  # its own: the trainer's random state stays untouched
        )
        before = set(multiprocessing.active_children())
        with deaf_children(), _own_handler():
            self._iterator: Iterator[Any] = iter(loader)
        self._workers = [w for w in multiprocessing.active_children() if w not in before]

    def batches(self) -> Generator[Batch, None, None]:
        """Every batch, in order."""
        try:
            while True:
                try:
                    with self._watching():
                        batch = next(self._iterator)
                except StopIteration:
                    return
                except (OSError, EOFError, RuntimeError, _Dead) as error:
                    if dead := self._dead(within=DYING_SECONDS):
                        raise self._death_of(dead) from error
                    raise
                if isinstance(batch, _Refusal):
                    raise batch.error
                yield batch.unpack()
        except Exception:
            self.stop(grace=0)  # its traceback holds torch's iterator, which would ask them first
            raise
        finally:
            self.stop()

    def stop(self, *, grace: float = STOP_SECONDS) -> None:
        """End the workers. They hold nothing that could be lost."""
        self._iterator = iter(())  # the loader's own destructor asks them to leave
        for worker in self._workers:
            worker.join(timeout=grace)
            if worker.is_alive():
                worker.kill()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Raise as soon as a worker is dead. By itself torch looks every five seconds, and raises
        wherever the main thread happens to be, in the middle of a checkpoint for example."""

        def look(*_: object) -> None:
            if self._dead():
                raise _Dead

        if threading.current_thread() is not threading.main_thread():
            look()
            yield
            return
        before = signal.signal(signal.SIGCHLD, look)
        try:
            look()
            yield
        finally:
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)

    def _dead(self, *, within: float = 0.0) -> BaseProcess | None:
        """A worker that ended otherwise than by having nothing left to do.

        within: seconds to wait for its end; its connections break a moment before.
        """
        last = time.monotonic() + within
        while True:
            for worker in self._workers:
                if not worker.is_alive() and worker.exitcode != 0:
                    return worker
            if time.monotonic() >= last:
                return None
            time.sleep(0.01)

    def _death_of(self, worker: BaseProcess) -> WorkerDiedError:
        known = {pid: self._doing[number] for number, pid in enumerate(self._pids)}
        number = known.get(worker.pid or 0, -1)
        doing = f"while it prepared {self._source.describe(number)}"
        if number < 0:
            doing = "before its first batch"
        code = worker.exitcode or 0
        how = f"with exit code {code}"
        if code < 0:
            how = f"by signal {signal.Signals(-code).name}"
        fix = {
            -signal.SIGKILL: "; if the system ran out of memory, lower data.workers",
            -signal.SIGBUS: "; shared memory is full: enlarge /dev/shm or lower data.workers",
        }.get(code, "")
        return WorkerDiedError(
            f"a process that prepares batches (pid {worker.pid}) ended {how} {doing}{fix}"
        )


@dataclass(frozen=True)
class _Refusal:
    """Data that cannot be used or had, on its way from a worker; torch would add a traceback."""

    error: DataError | CacheError | WorkerDiedError


@dataclass(frozen=True)
class _Watched(Dataset):
    """The source in a worker, which notes what it works on. doing, pids: shared, by worker."""

    source: BatchSource
    doing: Any
    pids: Any

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Shipment | _Refusal:
        worker = get_worker_info()
        assert worker is not None
        self.doing[worker.id], self.pids[worker.id] = number, os.getpid()
        try:
            return Shipment.of(self.source[number])
        except (DataError, CacheError, WorkerDiedError) as error:
            return _Refusal(error.with_traceback(None))


@contextmanager
def _own_handler() -> Iterator[None]:
    """Take back the handler of ended children, which torch replaces."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _stop(stream: weakref.ref[_Stream]) -> None:
    if (living := stream()) is not None:
        living.stop()


def _as_is(batch: Any) -> Any:
    return batch


def _set_up_worker(worker: int) -> None:
    set_up_child()
    # A worker told to end within a second of its start often aborts in the destructors of torch's
    # libraries, and its parent reports a crash. Its work is done by then: leave without them.
    atexit.register(os._exit, 0)
