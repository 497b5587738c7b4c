"""One point of a sweep as a process of its own, which ends with the one that started it.

Usage: python -P -m launcher.sweep.point RUN_DIR
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launcher.backends.protocol import OWNED
from launcher.guard import as_parent, die_with_parent
from launcher.own_packages import HOME

if TYPE_CHECKING:
    from launcher.sweep.folder import Point


def start_point(point: Point, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The process that trains a point; what it prints goes to point.log. environment: see
    `point_environment`."""
    with point.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.sweep.point", str(point.folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, **as_parent(), OWNED: "1"},
            start_new_session=True,  # a Ctrl-C at the terminal is for the sweep to pass on, once
        )


def point_environment() -> dict[str, str]:
    """This process's environment for the process of a point."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(HOME)}


if __name__ == "__main__":
    from launcher.tools import main as tool

    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # Ray's workers have it blocked
    sys.exit(tool(["resume", *sys.argv[1:]]))
