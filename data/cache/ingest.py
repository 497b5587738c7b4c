"""A process of its own that prepares a streaming source while a run trains on its first windows.

`python -m data.cache.ingest` reads a pickled (recipe, cache, processes) from its standard input,
and stops, with all that is done kept, when that is closed: when its owner stops it, or is gone.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from data.cache.lock import held, lock_file
from data.cache.prepare import prepare_set
from data.cache.prepared import PreparedSet
from data.cache.recipe import Recipe
from data.errors import CacheError, DataError, WorkerDiedError
from data.processes import deaf_children

Say = Callable[[str], None]

HOME = Path(__file__).resolve().parents[2]
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1

_running: dict[Path, subprocess.Popen[bytes]] = {}


def open_growing(
    recipe: Recipe, cache: Path, *, processes: int, say: Say, silent_seconds: float = 5.0
) -> PreparedSet:
    """The set of `recipe` as soon as its first window is there, while another process goes on.

    That process is started unless one is at work already, on whichever machine. It ends with this
    one. DataError, CacheError or WorkerDiedError when it failed before the first window.
    """
    folder = cache / recipe.folder_name
    began, told = time.monotonic(), False
    made = PreparedSet(folder)
    while not made.complete:
        working = held(lock_file(folder))
        if working and made.windows:
            break
        if not working and folder not in _running:
            _start(recipe, cache, processes=processes)
        elif folder in _running and _running[folder].poll() is not None:
            made.require_growing()
        if not told and time.monotonic() - began > silent_seconds:
            say(f"Waiting for the first documents of {recipe.name}.")
            told = True
        time.sleep(POLL_SECONDS)
    return PreparedSet.open(folder)


def stop_all() -> None:
    """Stop the processes that this one started; finished windows and progress are kept."""
    for folder, process in list(_running.items()):
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        del _running[folder]


def main() -> int:
    """The process itself."""
    recipe, cache, processes = pickle.load(sys.stdin.buffer)
    for number in (signal.SIGINT, signal.SIGTERM):  # only our owner stops us
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    threading.Thread(target=_watch_owner, daemon=True).start()
    try:
        prepare_set(recipe, cache, processes=processes, say=_quiet, keep_failed=True)
    except (DataError, CacheError, WorkerDiedError, KeyboardInterrupt):
        return 1  # whoever waits reads failed.json
    return 0


def _start(recipe: Recipe, cache: Path, *, processes: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HOME), "PYTHONSAFEPATH": "1"}
    with deaf_children():
        process = subprocess.Popen(
            [sys.executable, "-m", "data.cache.ingest"], stdin=subprocess.PIPE, env=environment
        )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((recipe, cache, processes)))
    process.stdin.flush()
    if not _running:
        atexit.register(stop_all)
    _running[cache / recipe.folder_name] = process


def _watch_owner() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGUSR1)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _quiet(text: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
