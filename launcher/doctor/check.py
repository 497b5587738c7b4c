"""A check, what it finds, and carrying out many of them without ever hanging."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """ok: nothing to do. warn: something will not work, or not well, that a run may not need.
    fail: a run would fail. found: what there is. fix: what to do; empty when ok."""

    level: Level
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """look: finds out, in a thread of its own; given up after deadline_s, and then the finding is
    `late` with late_fix."""

    name: str
    look: Callable[[], Finding]
    deadline_s: float = 10.0
    late: Level = "fail"
    late_fix: str = "see what this machine waits for, a file server perhaps"


def carried_out(checks: Sequence[Check]) -> Iterator[tuple[str, Finding]]:
    """Carry out all checks at once; yields name and finding in the order given."""
    found: dict[str, Finding] = {}

    def carry_out(check: Check) -> None:
        try:
            found[check.name] = check.look()
        except Exception as error:  # one check that breaks must not hide the others
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found[check.name] = Finding("fail", text, "please report it")

    began = time.monotonic()
    threads = []
    for check in checks:
        # A daemon: one that waits for a dead file server for ever must not keep the process.
        threads.append(threading.Thread(target=carry_out, args=(check,), daemon=True))
        threads[-1].start()
    for check, thread in zip(checks, threads, strict=True):
        thread.join(max(0.0, began + check.deadline_s - time.monotonic()))
        late = Finding(check.late, f"no answer in {check.deadline_s:g} s", check.late_fix)
        yield check.name, found.get(check.name, late)


def output_of(words: Sequence[str], *, timeout_s: float) -> str | None:
    """What a command prints; None when it fails, is missing, or takes too long."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
