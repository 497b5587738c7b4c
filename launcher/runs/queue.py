"""Whether a job is still in Slurm's queue, asked seldom."""

from __future__ import annotations

import getpass
import subprocess
import time

KEEP_S = 15.0  # an answer holds; the controller serves the whole cluster
PATIENCE_S = 5.0

_answer: tuple[float, frozenset[str] | None] = (0.0, None)  # when, in seconds since the epoch


def is_listed(job: str, *, since: float = 0.0) -> bool | None:
    """Whether this user's job, or task ARRAY_TASK of one, waits or runs; None when that cannot be
    found out from here. since: when it was submitted; no earlier answer can know of it."""
    global _answer
    now = time.time()
    if not 0 <= now - _answer[0] < KEEP_S or _answer[0] <= since <= now:
        _answer = (now, _jobs())
    return None if _answer[1] is None else job in _answer[1]


def _jobs() -> frozenset[str] | None:
    words = ["squeue", "--noheader", "--array", "--format=%A %F %i", f"--user={getpass.getuser()}"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(done.stdout.split()) if done.returncode == 0 else None
