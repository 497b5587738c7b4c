"""A sweep as one job array of a real Slurm: its points end, fail, and come back each for itself."""

from __future__ import annotations

import json
import re

import pytest

from launcher.sweep.folder import SweepFolder
from tests.slurm.conftest import Login, Submitted
from trainer.exit_codes import ExitCode

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(600)]


def submitted(login: Login, *words: str, faults: str) -> tuple[SweepFolder, list[Submitted]]:
    """A sweep in the queue, and its points."""
    ended = login.place.train(
        *(*login.place.small, "-m", "launcher=slurm", "resilience.max_failures=0", *words),
        env={"DSV41_FAULTS": faults},
    )
    assert ended.code == 0, ended.text
    job = re.search(r"^Job (\d+), an array of \d points$", ended.out, re.MULTILINE)
    assert job, ended.text
    (folder,) = (login.place.folder / "runs").iterdir()
    sweep = SweepFolder(folder)
    points = [Submitted(p.folder, f"{job[1]}_{p.number}", login.cluster) for p in sweep.points()]
    return sweep, points


@pytest.mark.slow
def test_three_points_end_one_fails_and_only_that_one_is_run_again(login: Login) -> None:
    sweep, points = submitted(login, "train.steps=1,2,3,4", faults="raise@forward,step=4,attempt=1")
    for point in points:
        point.until_state("COMPLETED", "FAILED")
    assert [point.facts()["JobState"] for point in points] == [*["COMPLETED"] * 3, "FAILED"]
    assert points[3].facts()["ExitCode"] == f"{int(ExitCode.BUG)}:0"
    assert [point.steps() for point in points] == [[1], [1, 2], [1, 2, 3], [1, 2, 3]]

    told = json.loads(login.place.run("dsv41", "sweep", "status", str(sweep.path), "--json").out)
    assert [point["state"] for point in told] == ["done", "done", "done", "failed"]
    assert told[3]["exit_code"] == ExitCode.BUG
    shown = login.place.run("dsv41", "sweep", "status", str(sweep.path)).out
    assert re.search(r"^003 +bug \(exit code 70\) +3/4 .* train\.steps=4$", shown, re.MULTILINE)
    assert "\ntrain.steps=4:\n  This should not have happened: FaultError" in shown
    assert sweep.picture.is_file()

    again = login.place.run("dsv41", "sweep", "retry", str(sweep.path))
    assert again.code == 0, again.text
    (retried,) = re.findall(r"^Job (\d+), an array of 1 point$", again.out, re.MULTILINE)
    last = Submitted(points[3].folder, f"{retried}_3", login.cluster)
    last.until_state("COMPLETED")
    assert last.steps() == [1, 2, 3, 4]
    assert [point.folder.last_attempt() for point in points] == [1, 1, 1, 2]
    assert all(point.folder.finished() for point in points)


@pytest.mark.long
def test_a_preempted_point_and_one_out_of_time_come_back_each_for_itself(login: Login) -> None:
    _, points = submitted(
        *(login, "seed=1,2", "train.steps=150", "resilience.grace_s=5"),
        *("launcher.slurm.time='10'", "launcher.slurm.extra=[--exclusive]"),
        faults="slow@forward,ms=1000,attempt=1",
    )
    for point in points:
        point.until_step(2)
    nodes = [point.facts()["NodeList"] for point in points]
    assert sorted(nodes) == ["n1", "n2"]
    login.cluster.run(
        *("sbatch", "--partition=high", f"--nodelist={nodes[1]}", "--exclusive"),
        *("--output=/dev/null", "--wrap=true"),
    )
    points[1].until(lambda: points[1].facts()["Restarts"] == "1", "queued again")
    assert (points[0].facts()["Restarts"], points[0].folder.last_attempt()) == ("0", 1)
    # Slurm counts in minutes, and warns up to a minute early: at its next look.
    login.cluster.run("scontrol", "update", f"JobId={points[0].job}", "TimeLimit=1")
    points[0].until(lambda: points[0].facts()["Restarts"] == "1", "queued again")
    login.cluster.run("scontrol", "update", f"JobId={points[0].job}", "TimeLimit=10")
    for point in points:
        point.until_state("COMPLETED")
        assert point.steps() == list(range(1, 151))
        assert point.folder.last_attempt() == 2
        assert point.end_of(1)["next"] == "requeue"
        assert point.facts()["Restarts"] == "1"


@pytest.mark.long
def test_points_are_stopped_each_for_itself(login: Login) -> None:
    sweep, points = submitted(
        *(login, "seed=1,2,3", "train.steps=200", "sweep.concurrency=2"),
        faults="slow@forward,ms=300",
    )
    for point in points[:2]:
        point.until_step(2)

    def stop(number: int, *words: str) -> str:
        run = str(points[number].folder.path)
        ended = login.place.run("dsv41", "stop", run, *words)
        assert ended.code == 0, ended.text
        return ended.out

    assert points[2].facts()["JobState"] == "PENDING"
    assert "/002: stopped, step 0" in stop(2)
    assert "/000: stopped" in stop(0, "--now")
    points[0].until_state("COMPLETED", "FAILED")
    assert points[2].facts()["JobState"] == "CANCELLED"
    assert points[2].folder.last_attempt() == 0
    reached = len(points[1].steps())
    points[1].until_step(reached + 2)
    assert "/001: stopped" in stop(1)
    assert points[1].folder.saved_step() == points[1].steps()[-1]
    shown = login.place.run("dsv41", "sweep", "status", str(sweep.path)).out
    rows = [line for line in shown.splitlines() if line.startswith("00")]
    assert [row.split()[1] for row in rows] == ["stopped", "stopped", "taken"]


@pytest.mark.slow
def test_an_unknown_partition_leaves_no_sweep(login: Login) -> None:
    ended = login.place.train(
        *(*login.place.small, "-m", "launcher=slurm", "seed=1,2"),
        "launcher.slurm.partition=nowhere",
    )
    assert ended.code == ExitCode.CONFIG
    assert "invalid partition specified: nowhere" in ended.err
    assert "sinfo lists the partitions" in ended.err
    assert login.place.names() == {"configs", "words.txt"}
