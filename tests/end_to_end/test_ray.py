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


def pids(place, name: str = "*") -> dict[int, int]:
    """Process ids by rank, of the newest attempt."""
    files = sorted(place.folder.glob(f"runs/{name}/*/attempts/*/heartbeat-*.json"))
    beats = [json.loads(file.read_text()) for file in files]
    return {beat["rank"]: beat["pid"] for beat in beats}


def saved(place, name: str) -> list[Path]:
    """The finished checkpoints of the runs of a name."""
    return [path for path in place.saved() if path.parts[-4] == name]


def supervisor(run: Path) -> int:
    """The process id of the one that supervises a run now."""
    return json.loads((run / "supervisor.json").read_text())["pid"]


def line(pid: int) -> str:
    """The words that a process was started with."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def await_end(processes: list[int]) -> None:
    """Until none of them is left, which may take five seconds, and as long again when busy."""
    deadline = time.monotonic() + 10
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, [pid for pid in processes if alive(pid)]
        time.sleep(0.1)


def told(process: subprocess.Popen, words: str) -> str | None:
    """The next line that it says, once that holds `words`."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return line if words in line else None


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

    def kept(self) -> list:
        """The names of its actors, and the number of its placement groups."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("list", file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


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


def on_both(nodes: Nodes) -> tuple[str, ...]:
    """The words for a rank on each of them."""
    return (f"launcher.ray.address={nodes.address}", "launcher.nodes=2")


def saving(place, nodes: Nodes, *, steps: int) -> tuple[subprocess.Popen, Path]:
    """A slow run on both nodes that has written a checkpoint: its command and its folder."""
    words = (*place.small, *MESH, *on_both(nodes), f"train.steps={steps}")
    process = place.begin(*words, env=SLOWLY)
    place.wait_for(place.saved, process)
    (run,) = place.runs()
    return process, run


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
    place.wait_for(lambda: saved(place, "other"), process)
    everyone = descendants(process.pid)
    process.kill()
    process.wait()
    await_end(everyone)


@pytest.mark.long
def test_a_lost_node_costs_no_sample(place, nodes) -> None:
    whole = place.train(*place.small, *MESH, "launcher=torchrun", "train.steps=8", "name=whole")
    assert whole.code == 0, whole.text
    there = on_both(nodes)

    process = place.begin(*place.small, *MESH, *there, "train.steps=8", "name=lost")
    place.wait_for(lambda: saved(place, "lost"), process)
    nodes.lose_one()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    (told,) = [line for line in out.splitlines() if line.startswith("Attempt 1 ended")]
    assert " was lost." in told
    assert "from the checkpoint of step" in told
    one, two = (place.folder / "runs" / name for name in ("whole", "lost"))
    assert place.losses(next(one.iterdir())) == place.losses(next(two.iterdir()))


# Steps that take a while, so that there is time to lose something and come back.
SLOWLY = {"DSV41_FAULTS": "slow@data,ms=400"}


@pytest.mark.slow
def test_a_run_in_a_cluster_goes_on_without_its_command(place, nodes) -> None:
    steps = "train.steps=20"
    whole = place.train(*place.small, *MESH, "launcher=torchrun", steps, "name=whole")
    assert whole.code == 0, whole.text
    there = on_both(nodes)

    process = place.begin(*place.small, *MESH, *there, steps, "name=kept", env=SLOWLY)
    place.wait_for(lambda: saved(place, "kept"), process)
    process.kill()
    out, err = process.communicate()
    assert (out.count("has the run and goes on if this command is lost"), err) == (1, "")
    (run,) = (place.folder / "runs" / "kept").iterdir()
    before, everyone = pids(place, "kept"), [supervisor(run), *pids(place, "kept").values()]
    reached = max(place.losses(run))

    back = place.run("dsv41", "resume", str(run))
    assert back.code == 0, back.text
    assert back.err == ""
    told, *lines = back.out.splitlines()
    assert told.startswith(f"{run} is being trained in the Ray cluster at {nodes.address}; follow")
    assert f"{reached + 1}/20  loss " in back.out and "20/20  loss " in back.out
    assert f"Run     {run}" in lines
    assert pids(place, "kept") == before
    assert [path.name for path in (run / "attempts").iterdir()] == ["001"]
    assert place.losses(run) == place.losses(next((place.folder / "runs" / "whole").iterdir()))
    assert nodes.kept() == [[], 0]
    assert not any(map(alive, everyone))


@pytest.mark.long
def test_a_lost_supervisor_is_started_again_by_the_cluster(place, nodes) -> None:
    process, run = saving(place, nodes, steps=30)
    process.kill()
    process.communicate()
    everyone = [supervisor(run), *pids(place).values()]
    os.kill(parent(supervisor(run)), signal.SIGKILL)  # the actor
    await_end(everyone)

    back = place.begin(str(run), command=("dsv41", "resume"))
    begun = len(place.saved())
    place.wait_for(lambda: len(place.saved()) > begun, back)
    everyone = [supervisor(run), *pids(place).values()]
    os.kill(supervisor(run), signal.SIGKILL)
    await_end(everyone)
    out, err = back.communicate(timeout=240)
    assert (back.returncode, err) == (0, ""), out + err
    for attempt in (1, 2):
        assert f"The supervisor of attempt {attempt} was lost; this one takes over." in out
        log = run / "attempts" / f"{attempt + 1:03d}" / "rank-00000.log"
        assert "resuming after step" in log.read_text()
    assert len(list((run / "attempts").iterdir())) == 3
    assert sorted(place.losses(run)) == list(range(1, 31))
    assert nodes.kept() == [[], 0]


@pytest.mark.long
def test_a_wish_to_stop_outlives_the_supervisor_that_it_was_told_to(place, nodes) -> None:
    process, run = saving(place, nodes, steps=2000)
    everyone = [supervisor(run), *pids(place).values()]
    os.kill(pids(place)[0], signal.SIGSTOP)  # or it stops as it was told to
    stop = place.begin(str(run), command=("dsv41", "stop"))
    place.wait_for((run / "attempts" / "001" / "stop").exists, stop)
    os.kill(supervisor(run), signal.SIGKILL)
    await_end(everyone)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, out + err
    assert "Stopped before attempt 2; attempt 1 had ended (lost)." in err
    out, err = stop.communicate(timeout=60)
    assert stop.returncode == 0 and f"{run.name}: stopped, step" in out, out + err
    assert len(list((run / "attempts").iterdir())) == 1
    assert nodes.kept() == [[], 0]


@pytest.mark.long
def test_a_command_that_came_back_stops_the_run_and_does_not_change_it(place, nodes) -> None:
    process, run = saving(place, nodes, steps=2000)
    (link,) = [pid for pid in descendants(process.pid) if "launcher.backends.ray.link" in line(pid)]
    os.kill(link, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.AGAIN, out + err
    assert f"The run may go on there; dsv41 resume {run} comes back to it." in err

    other = place.run("dsv41", "resume", str(run), "logging.every=3")
    assert other.code == ExitCode.CONFIG, other.text
    assert "cannot be changed meanwhile:\n  logging.every: 1 -> 3\nStop it first: " in other.err
    there = (*on_both(nodes), "train.steps=2000")
    words = (*place.small, *MESH, *there, f"id={run.name}", "resume=auto")
    process = place.begin(*words)
    out = place.wait_for(lambda: told(process, "following it"), process)
    assert str(run) in out
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, out + err
    assert "Stopped after step" in err and "Resume  " in err
    last = max(place.losses(run))
    assert f"step_{last:08d}" in {path.name for path in place.saved()}
    assert nodes.kept() == [[], 0]


@pytest.mark.long
def test_points_of_a_sweep_end_with_it(place, nodes) -> None:
    there = (*on_both(nodes), "train.steps=2000")
    process = place.begin("-m", *place.small, *MESH, *there, "seed=1,2")
    place.wait_for(place.saved, process)
    everyone = [*descendants(process.pid), *pids(place).values()]
    process.kill()
    process.communicate()
    await_end(everyone)
    assert nodes.kept() == [[], 0]


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
