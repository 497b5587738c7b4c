"""Each rank's sign of life, for whoever watches the run.

A thread writes attempts/NNN/heartbeat-RRRRR.json about every two seconds, and looks at the main
thread several times a second: where its stack stands tells whether it works or waits in a
collective for another rank. Nothing here can hurt training: what fails is left out.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from trainer import phase
from trainer.disk import put_text

INTERVAL = 2.0  # seconds between two beats
LOOK = 0.1  # seconds between two looks at the main thread
DUMP = "dump"  # in an attempt's folder: asks every rank for its stacks
BACKGROUND = "checkpoint-"  # how threads are named that save in the background

# Where a thread stands that waits for other ranks; the parts of torch.distributed that read and
# write files do not count.
_COLLECTIVES = ("/torch/distributed/", "/model/engram/exchange.py")
_FILES = "/torch/distributed/checkpoint/"


def heartbeat_file(attempt: Path, rank: int) -> Path:
    return attempt / f"heartbeat-{rank:05d}.json"


def stack_file(attempt: Path, rank: int) -> Path:
    """Where a rank that is asked to writes the stacks of its threads."""
    return attempt / f"stack-{rank:05d}.txt"


class Heartbeat:
    """While entered, this process gives signs of life in the folder of its attempt.

    It answers SIGUSR1 with the stacks of all threads, even where Python itself is stuck.
    """

    def __init__(self, attempt: Path, *, rank: int, interval: float = INTERVAL) -> None:
        self._attempt = attempt
        self._rank = rank
        self._interval = interval
        self._beat = 0
        self._waited: dict[str, float] = {}
        self._waiting = False
        self._main = threading.main_thread().ident or 0
        self._end = threading.Event()
        self._stacks: IO[str] | None = None
        self._answered = False
        self._thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        try:
            self._stacks = stack_file(self._attempt, self._rank).open("w", encoding="utf-8")
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True, chain=False)
        except OSError:  # a disk that refuses; the run's own files will tell
            pass
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join(timeout=1.0)  # a dead disk may hold it for ever
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            self._stacks.close()
            drop_if_empty(stack_file(self._attempt, self._rank))

    def facts(self) -> dict[str, Any]:
        """What a beat says. `time` and `phase_since` are seconds since the epoch; `seconds` and
        `waited`, the part of them spent in collectives, are by phase since the rank began."""
        name, since = phase.here.now
        now, clock = time.time(), time.monotonic()
        return {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": now,
            "beat": self._beat,
            "step": phase.here.step,
            "steps": phase.here.steps,
            "phase": name,
            "phase_since": now - (clock - since),
            "turn": phase.here.turn,
            "progress": phase.here.progress,
            "waiting": self._waiting,
            "seconds": _rounded(phase.here.seconds),
            "waited": _rounded(self._waited),
        }

    def _live(self) -> None:
        last = time.monotonic()
        written = -self._interval
        while not self._end.wait(LOOK):
            now = time.monotonic()
            self._look(now - last)
            last = now
            if now - written >= self._interval:
                written = now
                self._write()
                self._answer()
        self._write()

    def _look(self, seconds: float) -> None:
        self._waiting = waits_for_others(sys._current_frames(), main=self._main)
        if self._waiting:
            name = phase.here.now[0]
            self._waited[name] = self._waited.get(name, 0.0) + seconds

    def _write(self) -> None:
        self._beat += 1
        with suppress(OSError):
            file = heartbeat_file(self._attempt, self._rank)
            put_text(file, json.dumps(self.facts()) + "\n")

    def _answer(self) -> None:
        """Write the stacks if somebody without a way to send us a signal asks for them."""
        if self._answered or self._stacks is None:
            return
        with suppress(OSError, ValueError):
            if self._rank in json.loads((self._attempt / DUMP).read_text("utf-8")):
                self._answered = True
                faulthandler.dump_traceback(file=self._stacks, all_threads=True)


def waits_for_others(frames: Mapping[int, FrameType], *, main: int) -> bool:
    """Whether the main thread waits in a collective. `frames`: of all threads, by their ids.

    While it waits for a save in the background, that thread speaks for it.
    """
    if main not in frames:
        return False
    frame = frames[main]
    if frame.f_code.co_filename == threading.__file__:
        saving = (t for t in threading.enumerate() if t.name.startswith(BACKGROUND))
        found = (frames.get(thread.ident or 0) for thread in saving)
        frame = next((one for one in found if one is not None), frame)
    file = frame.f_code.co_filename.replace("\\", "/")
    return _FILES not in file and any(part in file for part in _COLLECTIVES)


def drop_if_empty(file: Path) -> None:
    """Remove `file` if nothing was written to it."""
    with suppress(OSError):
        if not file.stat().st_size:
            file.unlink()


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in list(seconds.items())}
