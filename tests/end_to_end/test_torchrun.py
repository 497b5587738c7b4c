"""Two ranks under torchrun's agent, as a user starts them, and what kills them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.processes import alive, descendants
from trainer.exit_codes import ExitCode

MESH = ("launcher=torchrun", "parallel.dp_shard=2", "checkpoint.every=2")


def losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def started(place, *words: str, env=None) -> subprocess.Popen:
    command = [str(Path(sys.executable).parent / "dsv41-train"), *place.small, *MESH, *words]
    return place.start(command, env)


def wait_for(what, process: subprocess.Popen, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
    return found


def ranks_below(pid: int) -> list[int]:
    """Process ids of the ranks, in the order of their start."""
    found = []
    for child in descendants(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"launcher.worker" in words:
            found.append(child)
    return found


def saved(place) -> list[Path]:
    return list(place.folder.glob("runs/*/*/checkpoints/step_????????"))


def test_a_killed_rank_costs_no_sample(place) -> None:
    whole = place.train(*place.small, *MESH, "train.steps=6", "name=whole")
    assert whole.code == 0, whole.text

    process = started(place, "train.steps=6", "name=killed")
    wait_for(lambda: [p for p in saved(place) if p.parts[-4] == "killed"], process)
    os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    (told,) = [line for line in out.splitlines() if line.startswith("Attempt 1 ended")]
    assert re.search(r"Rank [01] was killed by signal 9 \(SIGKILL", told)
    assert "from the checkpoint of step" in told
    one, two = (place.folder / "runs" / name for name in ("whole", "killed"))
    assert losses(next(one.iterdir())) == losses(next(two.iterdir()))


@pytest.mark.long
def test_nothing_outlives_a_killed_supervisor(place) -> None:
    process = started(place, "train.steps=1000")
    wait_for(lambda: saved(place), process)
    everyone = descendants(process.pid)
    assert len(ranks_below(process.pid)) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while any(map(alive, everyone)):
        assert time.monotonic() < deadline, [pid for pid in everyone if alive(pid)]
        time.sleep(0.1)


@pytest.mark.long
def test_ctrl_c_saves_and_a_second_one_leaves_at_once(place) -> None:
    process = started(place, "train.steps=1000")
    wait_for(lambda: saved(place), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, out + err
    assert "Stopped after step" in err
    assert "Resume  " in err

    process = started(place, "train.steps=1000", "name=hasty")
    wait_for(lambda: ranks_below(process.pid), process)
    everyone = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    assert not any(map(alive, everyone))


@pytest.mark.long
def test_two_nodes_share_the_ranks(place) -> None:
    process = started(
        place, "launcher.nodes=2", "launcher.torchrun.host=127.0.0.1", "train.steps=3"
    )
    (run,) = wait_for(lambda: list(place.folder.glob("runs/*/*/attempts")), process)
    other = place.run("dsv41", "join", str(run.parent), "--node", "1")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, other.code) == (0, 0), out + err + other.text
    assert "dsv41 join" in out
    assert sorted(p.name for p in run.glob("001/outcome-*.json")) == [
        "outcome-00000.json",
        "outcome-00001.json",
    ]


def test_a_host_that_does_not_resolve_is_an_error(place) -> None:
    ended = place.train(
        *place.small, *MESH, "launcher.nodes=2", "launcher.torchrun.host=no.such.host.invalid"
    )
    assert ended.code == ExitCode.CONFIG, ended.text
    assert "no.such.host.invalid does not resolve" in ended.err
    assert "launcher.torchrun.host=ADDRESS" in ended.err
