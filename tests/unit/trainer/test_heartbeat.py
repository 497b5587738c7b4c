"""Signs of life of real processes and threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer import phase
from trainer.heartbeat import DUMP, Heartbeat, heartbeat_file, stack_file, waits_for_others

ROOT = Path(__file__).parents[3]


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def beat(folder: Path, rank: int = 0) -> dict:
    return json.loads(heartbeat_file(folder, rank).read_text())


def test_it_tells_what_the_main_thread_does(tmp_path: Path) -> None:
    phase.begin()
    with Heartbeat(tmp_path, rank=3, interval=0.05):
        until(heartbeat_file(tmp_path, 3).exists)
        first = beat(tmp_path, 3)
        assert (first["rank"], first["pid"], first["step"]) == (3, os.getpid(), 0)
        assert (first["phase"], first["turn"], first["waiting"]) == ("start", 0, False)
        phase.begin_step(9)
        phase.enter("forward")
        until(lambda: beat(tmp_path, 3)["turn"] == 1)
        later = beat(tmp_path, 3)
        assert (later["step"], later["phase"]) == (9, "forward")
        assert later["beat"] > first["beat"]
        assert abs(later["phase_since"] - time.time()) < 20
        phase.enter("backward")
    last = beat(tmp_path, 3)  # written as it ends
    assert last["phase"] == "backward" and last["seconds"]["forward"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat-00003.json"]


def test_a_disk_that_refuses_hurts_nobody(tmp_path: Path) -> None:
    with Heartbeat(tmp_path / "missing", rank=0, interval=0.01):
        time.sleep(0.3)
    assert not any(tmp_path.iterdir())


def test_waiting_is_where_the_stack_stands() -> None:
    """Threads that stand in code of such names, as the frames of a collective would."""
    release = threading.Event()
    threads: list[threading.Thread] = []

    def standing(file: str, name: str) -> int:
        ready = threading.Event()
        space: dict = {"ready": ready, "release": release}
        # Busy in the frame itself: a lock's own frames would be the innermost ones.
        source = "def stand():\n ready.set()\n while not release.is_set_: pass"
        space["release"] = type("Flag", (), {"is_set_": False})
        flags.append(space["release"])
        exec(compile(source, file, "exec"), space)
        thread = threading.Thread(target=space["stand"], name=name, daemon=True)
        thread.start()
        threads.append(thread)
        ready.wait()
        assert thread.ident is not None
        return thread.ident

    flags: list = []
    site = "/usr/lib/python3/site-packages"
    try:
        for file, expected in (
            (f"{site}/torch/distributed/distributed_c10d.py", True),
            (f"{site}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", True),
            ("/run/code/model/engram/exchange.py", True),
            (f"{site}/torch/distributed/checkpoint/filesystem.py", False),
            ("/run/code/model/moe/routed.py", False),
        ):
            main = standing(file, "main")
            assert waits_for_others(sys._current_frames(), main=main) is expected, file
            flags[-1].is_set_ = True
        # A main thread that waits for the thread that saves does what that thread does.
        saver = standing(f"{site}/torch/distributed/distributed_c10d.py", "checkpoint-8")
        joining = threading.Thread(target=threads[-1].join, daemon=True)
        joining.start()
        assert joining.ident is not None
        until(lambda: waits_for_others(sys._current_frames(), main=joining.ident or 0))
        flags[-1].is_set_ = True
        threads[-1].join()
        assert saver and not waits_for_others({}, main=joining.ident)
    finally:
        for flag in flags:
            flag.is_set_ = True


PROGRAM = """
import sys, time
from pathlib import Path
from trainer import phase
from trainer.heartbeat import Heartbeat

def stuck_here():
    while True:
        time.sleep(60)

with Heartbeat(Path(sys.argv[1]), rank=int(sys.argv[2]), interval=0.1):
    phase.enter("forward")
    stuck_here()
"""


def test_two_processes_show_their_stacks_one_by_signal_one_by_file(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), str(rank)], env=environment)
        for rank in range(2)
    ]
    try:
        until(lambda: all(heartbeat_file(tmp_path, rank).exists() for rank in range(2)), 60)
        until(lambda: all(beat(tmp_path, rank)["phase"] == "forward" for rank in range(2)))
        os.kill(beat(tmp_path, 0)["pid"], signal.SIGUSR1)
        (tmp_path / DUMP).write_text("[1]")
        for rank in range(2):
            until(lambda rank=rank: "in stuck_here" in stack_file(tmp_path, rank).read_text())
        assert "Thread" in stack_file(tmp_path, 0).read_text()
        time.sleep(0.5)  # asked once, it answers once
        assert stack_file(tmp_path, 1).read_text().count("in stuck_here") == 1
        assert all(process.poll() is None for process in found)
        assert "waiting" in beat(tmp_path, 1) and not beat(tmp_path, 1)["waiting"]
    finally:
        for process in found:
            process.kill()
            process.wait()
