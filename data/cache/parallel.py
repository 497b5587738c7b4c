"""Runs something over a source in several processes, in the source's order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from data.errors import WorkerDiedError
from data.processes import deaf_children, set_up_child
from data.sources.base import Block, Source

SMALL = 8 * 2**20  # bytes of a source that is read sooner than processes start

T = TypeVar("T", covariant=True)


class Runs(Protocol[T]):
    """What can be run over a source, block by block."""

    @property
    def source(self) -> Source: ...

    def run(self, block: Block) -> T: ...


_pipeline: Runs[Any] | None = None


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outcomes(
    pipeline: Runs[T], *, position: Any, processes: int
) -> Generator[tuple[Block, T], None, None]:
    """Each block from `position` on with its outcome. At most processes + 2 blocks are held.

    What comes out does not depend on `processes`. WorkerDiedError when one of them is killed.
    """
    blocks = pipeline.source.blocks(position)
    size = pipeline.source.size
    if processes == 1 or (size is not None and size < SMALL):
        for block in blocks:
            yield block, pipeline.run(block)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_set_up,
        initargs=(pipeline,),
    )
    try:
        yield from _in_order(pool, blocks, ahead=processes + 2)
    except BrokenProcessPool as error:
        raise WorkerDiedError(
            "A tokenising process was killed, perhaps because memory ran out; lower "
            "data.processes if so. Finished work is kept: the same command goes on from there."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, blocks: Iterator[Block], *, ahead: int
) -> Iterator[tuple[Block, Any]]:
    pending: deque[tuple[Block, Future[Any]]] = deque()
    for block in blocks:
        with deaf_children():
            future = pool.submit(_run, block)
        pending.append((Block(None, block.position, block.done), future))
        if len(pending) == ahead:
            first, future = pending.popleft()
            yield first, future.result()
    while pending:
        first, future = pending.popleft()
        yield first, future.result()


def _set_up(pipeline: Runs[Any]) -> None:
    global _pipeline
    set_up_child()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    _pipeline = pipeline


def _run(block: Block) -> Any:
    assert _pipeline is not None
    return _pipeline.run(block)
