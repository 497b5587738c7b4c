"""The stacks of all ranks, gathered into one file for whoever must find out why they hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.run_dir import Attempt
from launcher.watch.beats import Beat
from trainer.disk import put_text
from trainer.heartbeat import DUMP, INTERVAL, drop_if_empty, stack_file

NAME = "stacks.txt"
WAIT_SECONDS = 2 * INTERVAL + 1.0
_WORDS = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "its system keeps it waiting, for a disk or a device",
    "Z": "it is dead",
}


def gather(attempt: Attempt, beats: Mapping[int, Beat], *, seconds: float = WAIT_SECONDS) -> Path:
    """Ask every rank for its stacks, wait up to `seconds` for them, and write them all to one file;
    where that is. OSError when it cannot be written.

    Ranks on this machine are asked by a signal, which works even where Python is stuck; others by a
    file that their heartbeats look for.
    """
    far = [beat.rank for beat in beats.values() if not _signalled(beat)]
    if far:
        put_text(attempt.path / DUMP, json.dumps(far))
    files = {rank: stack_file(attempt.path, rank) for rank in beats}
    _wait([files[rank] for rank, beat in beats.items() if not state_of(beat)], seconds)
    target = attempt.path / NAME
    parts = [_part(beat, files[rank]) for rank, beat in sorted(beats.items())]
    put_text(target, "\n\n".join(parts) + "\n")
    for file in (attempt.path / DUMP, *files.values()):
        file.unlink(missing_ok=True)
    return target


def tidy(attempt: Attempt) -> None:
    """Remove what ranks that were killed have prepared for stacks nobody asked for."""
    for file in attempt.path.glob("stack-*.txt"):
        drop_if_empty(file)


def state_of(beat: Beat) -> str | None:
    """What the system says of a rank on this machine that is silent; None when nothing special."""
    if beat.host != socket.gethostname():
        return None
    status = _status(beat.pid)
    if status is None:
        return "its process is gone"
    return _WORDS.get(status.get("State", "?")[:1])


def _signalled(beat: Beat) -> bool:
    if beat.host != socket.gethostname():
        return False
    caught = int((_status(beat.pid) or {}).get("SigCgt", "0"), 16)
    if not caught >> (signal.SIGUSR1 - 1) & 1:
        return False  # it would die of it, or has died and the id is another's
    with suppress(OSError):
        os.kill(beat.pid, signal.SIGUSR1)
        return True
    return False


def _status(pid: int) -> dict[str, str] | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except OSError:
        return None
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _wait(files: Sequence[Path], seconds: float) -> None:
    """Until all have something in them and grow no more."""
    end, before = time.monotonic() + seconds, None
    while time.monotonic() < end:
        sizes = [_size(file) for file in files]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(0.1)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _part(beat: Beat, file: Path) -> str:
    waits = ", waiting for others" if beat.waiting else ""
    title = f"==== {beat.named}: {beat.where}{waits}"
    try:
        text = file.read_text("utf-8", errors="replace").strip()
    except OSError:
        text = ""
    return f"{title}\n{text or 'no stack: ' + (state_of(beat) or 'no answer')}"
