"""The processes below a process, and their end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

KILL_SECONDS = 10.0


def descendants(pid: int) -> list[int]:
    """Ids of all processes below `pid`, parents first; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, at = [pid], 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found[1:]


def send(pids: Iterable[int], number: int) -> None:
    """Signal every one that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end_tree(pid: int) -> None:
    """SIGKILL to `pid` and everything below it; returns when all are gone, or ten seconds later.

    The first is stopped before its children are listed, so that it starts no others.
    """
    send([pid], signal.SIGSTOP)
    everyone = [pid, *descendants(pid)]
    send(everyone, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while any(map(alive, everyone)) and time.monotonic() < deadline:
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process of this id runs: not one that only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def killed_by(number: int) -> str:
    """In words, what a process died of."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"was killed by signal {number}"
    hint = "; often the system, out of memory" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}{hint})"


def without_rank() -> dict[str, str]:
    """The environment, less what would make a process started with it believe that it is a rank."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ours}
