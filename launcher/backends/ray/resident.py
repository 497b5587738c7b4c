"""Ray's actor that keeps a run in a cluster: the run's supervisor is a child of it.

The actor belongs to no command, so that a run outlives the one that started it; Ray finds it by its
name, for whoever wants to know whether the run is there. When it is lost, with its node or alone,
Ray starts it again somewhere, and with it a supervisor that goes on from the last checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.guard import as_parent
from launcher.processes import without_rank
from launcher.run_dir import RunFolder
from launcher.runs.names import label

NAMESPACE = "dsv41"


class Resident:
    """Starts the supervisor of the run in `folder`, and ends with it.

    environment: what that needs beside the environment of the node. One that was killed is lost
    like a node, and Ray's to start again; any other end of it is the run's.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        import ray

        self._myself: Any = ray.get_runtime_context().current_actor
        # What Ray has set is for this process, the one thread of an actor without CPUs too.
        rays = ("RAY_", "OMP_NUM_THREADS")
        own = {k: v for k, v in without_rank().items() if not k.startswith(rays)}
        with supervisor_log(RunFolder(folder)).open("ab") as log:
            # Here, in the thread whose end the kernel tells a child of.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.backends.ray.work", str(folder)],
                env={**own, **environment, **as_parent()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        threading.Thread(target=self._end_with_it, name="supervisor", daemon=True).start()

    def is_there(self) -> bool:
        return True

    def _end_with_it(self) -> None:
        import ray

        if self._process.wait() < 0:
            os._exit(1)
        ray.kill(self._myself, no_restart=True)


def supervisor_log(folder: RunFolder) -> Path:
    """Where a supervisor in a cluster says what the command would, and what rank 0 shows."""
    return folder.path / "supervisor.log"


def actor_name(folder: RunFolder) -> str:
    """What the cluster knows a run by: its name and id, and where it lies."""
    place = hashlib.sha256(os.path.realpath(folder.path).encode()).hexdigest()
    return f"{label(folder)} {place[:16]}"
