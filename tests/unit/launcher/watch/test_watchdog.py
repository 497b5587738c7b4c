"""A watchdog over heartbeat files, by a clock of the test's own; and over real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.run_dir import Attempt
from launcher.watch.watchdog import PATIENCE, Hang, Watchdog
from trainer.exit_codes import ExitCode
from trainer.heartbeat import heartbeat_file, stack_file

ROOT = Path(__file__).parents[4]
PLACE = {"host": "elsewhere", "pid": 1, "phase": "forward", "step": 5, "steps": 4, "turn": 50}


class Scene:
    """Two ranks of an attempt, and the watchdog that looks at them every two seconds."""

    def __init__(self, folder: Path, *, hang_s: float = 60.0, **options: Any) -> None:
        self.attempt = Attempt(folder / "001")
        self.attempt.path.mkdir()
        self.now = 1000.0
        self.said: list[str] = []
        self.dog = Watchdog(
            self.attempt, world=2, hang_s=hang_s, say=self.said.append, now=self.now, **options
        )
        self.beats: dict[int, dict[str, Any]] = {}

    def beat(self, rank: int, **said: Any) -> None:
        """A new sign of life, the rest of it as before."""
        known = self.beats.get(rank) or {
            **PLACE, "rank": rank, "beat": 0, "progress": 0, "waiting": True, "seconds": {},
            "waited": {},
        }  # fmt: skip
        self.beats[rank] = {**known, **said, "beat": known["beat"] + 1}
        heartbeat_file(self.attempt.path, rank).write_text(json.dumps(self.beats[rank]))

    def watch(self, seconds: float, *, alive: tuple[int, ...] = (0, 1)) -> Hang | None:
        """Time passes; the ranks `alive` go on giving signs, without finishing anything."""
        end = self.now + seconds
        while self.now < end:
            self.now += 2.5
            for rank in alive:
                self.beat(rank)
            if hang := self.dog.check(self.now):
                return hang
        return None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank answers here: do not wait for stacks."""
    monkeypatch.setattr("launcher.watch.stacks.WAIT_SECONDS", 0.0)
    monkeypatch.setattr("launcher.watch.stacks._wait", lambda files, seconds: None)


@pytest.mark.usefixtures("quick")
def test_no_hang_while_anything_is_finished(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for number in range(8):
        scene.beat(0, turn=50 + number)
        scene.beat(1)
        assert scene.watch(55) is None
    for number in range(8):  # slices of a save in the background
        scene.beat(1, progress=number + 1)
        assert scene.watch(55) is None
    assert scene.watch(62) is not None


@pytest.mark.usefixtures("quick")
def test_a_hang_names_the_rank_and_leaves_the_stacks(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.beat(0)
    scene.beat(1, phase="data", turn=47, waiting=False)
    began = scene.now
    hang = scene.watch(200)
    assert hang is not None and 60 < scene.now - began < 68
    assert (hang.rank, hang.phase, hang.step) == (1, "data", 5)
    outcome = hang.outcome()
    assert (outcome.code, outcome.reason, outcome.step) == (ExitCode.HANG, "hang", 4)
    first = outcome.message.splitlines()[0]
    assert "Rank 1 (elsewhere, pid 1) is stuck in data of step 5. For it rank 0 waits in" in first
    assert hang.stacks is not None and str(hang.stacks) in outcome.message
    text = hang.stacks.read_text()
    assert "==== Rank 0 (elsewhere, pid 1): forward of step 5, waiting for others" in text
    assert "no stack: no answer" in text
    assert not (scene.attempt.path / "dump").exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "place", [{"phase": "start", "steps": 0}, {"phase": "save"}, {"steps": 0}, {"phase": "close"}]
)
def test_starts_first_steps_and_saves_may_take_longer(tmp_path: Path, place: dict) -> None:
    scene = Scene(tmp_path)
    for rank in range(2):
        scene.beat(rank, **place)
    assert scene.watch(60 * PATIENCE - 5) is None
    assert scene.watch(15) is not None


@pytest.mark.usefixtures("quick")
def test_a_silent_rank_is_the_one_to_blame(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.beat(0)
    scene.beat(1, waiting=False)
    assert scene.watch(20) is None
    hang = scene.watch(100, alive=(1,))
    assert hang is not None and hang.rank == 0
    assert "Rank 0 (elsewhere, pid 1) has given no sign of life for" in hang.message


@pytest.mark.usefixtures("quick")
def test_what_a_silent_rank_did_last_buys_the_others_no_time(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.beat(0, phase="start", steps=0, step=0)
    scene.beat(1)
    began = scene.now
    hang = scene.watch(200, alive=(1,))
    assert hang is not None and 60 < scene.now - began < 68
    assert (hang.rank, hang.phase, hang.step) == (0, "start", 5)


@pytest.mark.usefixtures("quick")
def test_when_nothing_is_heard_of_anybody_the_folder_gets_the_benefit_of_the_doubt(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    scene.beat(0)
    scene.beat(1)
    scene.watch(5)
    assert scene.watch(60 * PATIENCE - 10, alive=()) is None
    hang = scene.watch(20, alive=())
    assert hang is not None and hang.rank is None and "the shared folder" in hang.message


@pytest.mark.usefixtures("quick")
def test_time_in_which_the_watchdog_itself_stood_still_counts_for_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.beat(0)
    scene.beat(1)
    assert scene.watch(50) is None
    scene.now += 3600  # Ctrl-Z, or a laptop that was closed
    assert scene.watch(5) is None
    scene.beat(0, turn=51)
    assert scene.watch(55) is None


@pytest.mark.usefixtures("quick")
def test_a_rank_that_never_came_is_named_and_zero_means_never(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.beat(0, phase="start")
    hang = scene.watch(60 * PATIENCE + 10, alive=(0,))
    assert hang is not None and "Rank 1 never gave a sign of life." in hang.message
    (tmp_path / "off").mkdir()
    assert Scene(tmp_path / "off", hang_s=0).watch(10_000, alive=()) is None


def test_a_slow_rank_is_told_once_in_a_while(tmp_path: Path) -> None:
    scene = Scene(tmp_path, window_steps=10, window_s=5.0)
    for steps in range(1, 260):
        for rank, own in ((0, 0.1), (1, 0.9)):
            seconds = {"forward": 1.0 * steps, "start": 9.0 * rank}
            waited = {"forward": (1.0 - own) * steps}
            scene.beat(
                rank, steps=steps, step=steps + 1, turn=steps, seconds=seconds, waited=waited
            )
        assert scene.watch(2.5) is None
    assert len(scene.said) == 3, scene.said
    assert scene.said[0].startswith("Rank 1 (elsewhere) is slow: 0.90 s of its own work a step")
    events = (scene.attempt.path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["phase"] for line in events] == ["forward"] * 3


def test_files_that_are_damaged_or_missing_are_nothing_seen(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    heartbeat_file(scene.attempt.path, 0).write_text('{"rank": 0, "pid"')
    heartbeat_file(scene.attempt.path, 1).write_text("[]")
    scene.now += 5
    assert scene.dog.check(scene.now) is None
    scene.dog.close()


PROGRAM = """
import sys, time
from pathlib import Path
from trainer import phase
from trainer.heartbeat import Heartbeat

def stuck_in_the_middle():
    while True:
        time.sleep(60)

with Heartbeat(Path(sys.argv[1]), rank=int(sys.argv[2]), interval=0.1):
    phase.begin_step(8)
    phase.end_step()
    phase.enter("forward")
    if sys.argv[2] == "0":
        phase.enter("backward")
    stuck_in_the_middle()
"""


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("stopped", [False, True])
def test_real_processes_show_their_stacks(tmp_path: Path, stopped: bool) -> None:
    attempt = Attempt(tmp_path)
    found = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(rank)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]

    def phase_of(rank: int) -> str:
        file = heartbeat_file(tmp_path, rank)
        return json.loads(file.read_text())["phase"] if file.exists() else ""

    try:
        until(lambda: (phase_of(0), phase_of(1)) == ("backward", "forward"))
        if stopped:
            found[1].send_signal(signal.SIGSTOP)
        dog = Watchdog(attempt, world=2, hang_s=4.0, say=print, now=0.0)
        assert dog.check(3.0) is None
        time.sleep(0.5)  # rank 0 lives on
        assert dog.check(6.0) is None or stopped
        time.sleep(0.5)
        hang = dog.check(30.0)
        assert hang is not None and hang.rank == 1 and hang.phase == "forward"
        assert f"Rank 1 ({os.uname().nodename}, pid {found[1].pid})" in hang.message
        assert ("SIGSTOP" if stopped else "is stuck in forward of step 8") in hang.message
        assert hang.stacks is not None
        _, first, second = hang.stacks.read_text().split("==== ")
        assert "in stuck_in_the_middle" in first
        assert ("no stack: it is stopped" if stopped else "in stuck_in_the_middle") in second
        assert [process.poll() for process in found] == [None, None]
        assert not stack_file(tmp_path, 0).exists()
    finally:
        for process in found:
            process.kill()
            process.wait()
