"""Two ranks on real Ray clusters, as a user starts them, and what they lose."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.processes import alive, descendants, end_tree
from trainer.exit_codes import ExitCode

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.xdist_group("ray")

MESH = ("launcher=ray", "parallel.dp_shard=2", "checkpoint.every=2")


def pids(place) -> dict[int, int]:
    """Process ids by rank, of the newest attempt."""
    files = sorted(place.folder.glob("runs/*/*/attempts/*/heartbeat-*.json"))
    beats = [json.loads(file.read_text()) for file in files]
    return {beat["rank"]: beat["pid"] for beat in beats}


@dataclass
class Nodes:
    """A cluster of two nodes on this machine."""

    process: subprocess.Popen
    address: str

    def lose_one(self) -> None:
        """And let another one join."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("lose", file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "lost\n"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="dsv41-test-", dir="/tmp")
    words = [sys.executable, "-P", str(Path(__file__).with_name("ray_nodes.py"))]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "RAY_TMPDIR": folder,  # or it would be the cluster that others on this machine find
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (Path(folder) / "log").open("wb") as log:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, (Path(folder) / "log").read_text()
        yield Nodes(process, address)
    finally:
        end_tree(process.pid)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_cluster_that_does_not_answer_is_an_error(place) -> None:
    ended = place.train(*place.small, *MESH, "launcher.ray.address=127.0.0.1:1")
    assert ended.code == ExitCode.CONFIG, ended.text
    assert "127.0.0.1:1 cannot be reached: Connection refused" in ended.err
    assert "ray start --head" in ended.err
    assert "Traceback" not in ended.text


@pytest.mark.long
def test_a_killed_rank_is_started_again_in_a_cluster_of_its_own(place) -> None:
    process = place.begin(*place.small, *MESH, "train.steps=6")
    place.wait_for(place.saved, process)
    everyone = descendants(process.pid)
    os.kill(pids(place)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    (told,) = [line for line in out.splitlines() if line.startswith("Attempt 1 ended")]
    assert "was killed by signal 9 (SIGKILL" in told
    assert "from the checkpoint of step" in told
    assert "step 6/6" in out
    assert err == ""
    (run,) = place.runs()
    assert sorted(place.losses(run)) == [1, 2, 3, 4, 5, 6]
    assert not any(map(alive, everyone))


@pytest.mark.long
def test_ctrl_c_saves_and_nothing_outlives_a_killed_supervisor(place) -> None:
    process = place.begin(*place.small, *MESH, "train.steps=1000")
    place.wait_for(place.saved, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, out + err
    assert "Stopped after step" in err

    process = place.begin(*place.small, *MESH, "train.steps=1000", "name=other")
    place.wait_for(lambda: [p for p in place.saved() if p.parts[-4] == "other"], process)
    everyone = descendants(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, everyone)):
        assert time.monotonic() < deadline, [pid for pid in everyone if alive(pid)]
        time.sleep(0.1)


@pytest.mark.long
def test_a_lost_node_costs_no_sample(place, nodes) -> None:
    whole = place.train(*place.small, *MESH, "launcher=torchrun", "train.steps=8", "name=whole")
    assert whole.code == 0, whole.text
    there = (f"launcher.ray.address={nodes.address}", "launcher.nodes=2")

    process = place.begin(*place.small, *MESH, *there, "train.steps=8", "name=lost")
    place.wait_for(lambda: [p for p in place.saved() if p.parts[-4] == "lost"], process)
    nodes.lose_one()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    (told,) = [line for line in out.splitlines() if line.startswith("Attempt 1 ended")]
    assert " was lost." in told
    assert "from the checkpoint of step" in told
    one, two = (place.folder / "runs" / name for name in ("whole", "lost"))
    assert place.losses(next(one.iterdir())) == place.losses(next(two.iterdir()))


@pytest.mark.long
def test_a_cluster_without_room_is_waited_for_and_then_an_error(place, nodes) -> None:
    ended = place.train(
        *(*place.small, *MESH, f"launcher.ray.address={nodes.address}", "launcher.nodes=2"),
        *("launcher.ray.cpus_per_rank=3", "launcher.ray.wait_s=7"),
    )
    assert ended.code == ExitCode.CONFIG, ended.text
    assert "Waiting for room in the Ray cluster: it needs 2 x 3 CPU, 0 GPU each" in ended.out
    assert "Nodes there: 1 CPU, 0 GPU; 1 CPU, 0 GPU." in ended.err
    assert "launcher.ray.cpus_per_rank" in ended.err
