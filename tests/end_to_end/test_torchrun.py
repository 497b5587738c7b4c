"""Two ranks under torchrun's agent, as a user starts them, and what kills them."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from launcher.processes import alive, descendants
from tests.end_to_end.conftest import installed
from trainer.exit_codes import ExitCode

MESH = ("launcher=torchrun", "parallel.dp_shard=2", "checkpoint.every=2")


def ranks_below(pid: int) -> list[int]:
    """Process ids of the ranks, in the order of their start."""
    found = []
    for child in descendants(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"launcher.worker" in words and b"launcher.backends.agent" not in words:
            found.append(child)
    return found


@pytest.mark.long
def test_a_killed_rank_costs_no_sample(place) -> None:
    whole = place.train(*place.small, *MESH, "train.steps=6", "name=whole")
    assert whole.code == 0, whole.text

    process = place.begin(*place.small, *MESH, "train.steps=6", "name=killed")
    place.wait_for(lambda: [p for p in place.saved() if p.parts[-4] == "killed"], process)
    os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    (told,) = [line for line in out.splitlines() if line.startswith("Attempt 1 ended")]
    assert re.search(r"Rank [01] was killed by signal 9 \(SIGKILL", told)
    assert "from the checkpoint of step" in told
    one, two = (place.folder / "runs" / name for name in ("whole", "killed"))
    assert place.losses(next(one.iterdir())) == place.losses(next(two.iterdir()))


@pytest.mark.long
def test_nothing_outlives_a_killed_supervisor(place) -> None:
    process = place.begin(*place.small, *MESH, "train.steps=1000")
    place.wait_for(place.saved, process)
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
    process = place.begin(*place.small, *MESH, "train.steps=1000")
    place.wait_for(place.saved, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, out + err
    assert "Stopped after step" in err
    assert "Resume  " in err

    process = place.begin(*place.small, *MESH, "train.steps=1000", "name=hasty")
    place.wait_for(lambda: ranks_below(process.pid), process)
    everyone = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    assert not any(map(alive, everyone))


@pytest.mark.long
def test_two_nodes_share_the_ranks(place) -> None:
    nodes = ("launcher.nodes=2", "launcher.torchrun.host=127.0.0.1")
    process = place.begin(*place.small, *MESH, *nodes, "train.steps=3")
    (run,) = place.wait_for(lambda: list(place.folder.glob("runs/*/[!.]*/attempts")), process)
    other = place.run("dsv41", "join", str(run.parent), "--node", "1")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, other.code) == (0, 0), out + err + other.text
    assert "dsv41 join" in out
    assert sorted(p.name for p in run.glob("001/outcome-*.json")) == [
        "outcome-00000.json",
        "outcome-00001.json",
    ]


@pytest.mark.long
def test_a_node_that_is_taken_away_leaves_a_checkpoint(place) -> None:
    """Another machine takes its place: the same command there joins the next attempt."""
    nodes = ("launcher.nodes=2", "launcher.torchrun.host=127.0.0.1", "checkpoint.every=0")
    place.env["DSV41_FAULTS"] = "slow@forward,attempt=1,ms=300"
    process = place.begin(*place.small, *MESH[:2], *nodes, "train.steps=40")
    (run,) = place.wait_for(lambda: list(place.folder.glob("runs/*/[!.]*/attempts")), process)
    words = [installed("dsv41"), "join", str(run.parent), "--node", "1"]
    other = place.start(words)
    place.wait_for(lambda: place.metrics() and place.metrics()[0].stat().st_size, process)
    other.send_signal(signal.SIGTERM)
    told, err = other.communicate(timeout=120)
    assert other.returncode == ExitCode.AGAIN, told + err
    assert "Told to end: after this step, with a checkpoint." in told
    assert place.saved()

    place.wait_for((run / "002" / "rendezvous.json").is_file, process)
    other = place.start(words)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, other.wait(60)) == (0, 0), out + err
    assert "Attempt 1 ended (stopped): Stopped after step" in out and "(preemption 1)" in out


def test_a_host_that_does_not_resolve_is_an_error(place) -> None:
    ended = place.train(
        *place.small, *MESH, "launcher.nodes=2", "launcher.torchrun.host=no.such.host.invalid"
    )
    assert ended.code == ExitCode.CONFIG, ended.text
    assert "no.such.host.invalid does not resolve" in ended.err
    assert "launcher.torchrun.host=ADDRESS" in ended.err
    assert place.runs() == []
