"""A pool of processes that live as long as the tests: starting eight ranks takes longer than what
they are started for.

    def twice(number): return 2 * number + dist.get_rank()      # at module level

    def test_it(ranks): assert ranks.run(2, twice, 10) == [20, 21]

Modules that use it need `pytestmark = pytest.mark.xdist_group("ranks")`: then one pytest process
runs them all, with one pool.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 240.0
POOL_NAME = "rank-of-the-tests"


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


class Ranks:
    """Processes started when first needed, up to `most`; close() ends them."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._members: list[tuple[Any, Connection]] = []
        atexit.register(self.close)  # else multiprocessing waits for them for ever

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
    ) -> list[Any]:
        """function(*args) on `world` ranks with a gloo process group: their results by rank.

        Results are pickled, tensors too. If a rank raises or does not answer, RankError, and the
        pool begins anew with the next call.
        """
        assert world <= self._most
        while len(self._members) < world:
            self._members.append(_start())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [pipe for _, pipe in self._members[:world]]
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, world, port, function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < world:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = [rank for rank in range(world) if rank not in answers]
                answers |= dict.fromkeys(silent, (False, f"no answer within {timeout:g} s"))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[pipes.index(pipe)] = pipe.recv()
                except EOFError:
                    answers[pipes.index(pipe)] = False, "the process ended"
            if any(not good for good, _ in answers.values()):
                # The others may wait for it for ever; give them a moment to say their part.
                deadline = min(deadline, time.monotonic() + 5.0)
        if bad := {rank: text for rank, (good, text) in sorted(answers.items()) if not good}:
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in bad.items()))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """Kill all processes."""
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
        self._members.clear()


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        process = context.Process(
            target=_serve, args=(theirs,), name=f"{POOL_NAME}-{os.getpid()}", daemon=False
        )
        process.start()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, world, port, function, args = pipe.recv()
        except EOFError:
            return
        try:
            meeting = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
            try:
                result = function(*args)
                dist.barrier()
            finally:
                dist.destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        else:
            pipe.send((True, result))
