"""`dsv41 runs` and `dsv41 status`: the states of runs, the names they go by, what comes next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.own_packages import HOME
from launcher.runs import queue
from launcher.runs.view import view_of
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

from .conftest import Called, Shelf

Call = Callable[..., Called]


def table(out: str) -> dict[str, list[str]]:
    """The rows of `dsv41 runs`, by run."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}


def test_the_table_has_every_run_newest_first(shelf: Shelf, call: Call) -> None:
    done = shelf.run("a/1", records=3)
    shelf.attempt(done, ExitCode.DONE, "done", 90)
    bad = shelf.run("a/2", records=7)
    shelf.attempt(bad, ExitCode.AGAIN, "stopped", 4)
    shelf.attempt(bad, ExitCode.IO_ERROR, "disk full", 7)
    stopped = shelf.run("b/3")
    shelf.attempt(stopped, ExitCode.INTERRUPTED, "interrupted", 5)
    dead = shelf.run("b/4", records=2)
    shelf.attempt(dead)
    shelf.run("b/5")
    busy = shelf.run("c/6")
    shelf.attempt(busy)
    with busy.held():
        code, out, err = call("runs")
    assert (code, err) == (0, "")
    rows = table(out)
    assert list(rows) == ["c/6", "b/5", "b/4", "b/3", "a/2", "a/1"]
    assert rows["c/6"][0] == "running" and rows["b/5"][0] == "new"
    assert rows["a/1"][:4] == ["done", "90/90", "9.700", "1,003"]
    assert rows["a/2"][:4] == ["failed:", "disk", "full", "7/90"] and rows["a/2"][-1] == "2"
    assert rows["b/3"][:2] == ["stopped", "5/90"]
    assert " ".join(rows["b/4"]).startswith("failed: ended without a word 2/90 9.800")
    assert table(call("runs", "runs/a")[1]).keys() == {"a/1", "a/2"}


def test_json_says_the_same(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1", records=3)
    shelf.attempt(run, ExitCode.DIVERGED, "diverged", 3)
    (run.path / "lineage.json").write_text('{"parent": "/x/runs/a/0", "step": 2}')
    (found,) = json.loads(call("runs", "--json")[1])["runs"]
    assert found["state"] == "failed" and found["reason"] == "diverged"
    assert (found["step"], found["steps"], found["loss"], found["attempts"]) == (3, 90, 9.7, 1)
    assert found["parent"] == "/x/runs/a/0" and found["created"] < found["updated"]
    status = json.loads(call("status", "a/1", "--json")[1])
    assert status["attempts"][0]["outcome"]["code"] == ExitCode.DIVERGED
    assert status["last"]["step"] == 3 and status["lineage"]["step"] == 2
    assert "a/0 at 2" in call("runs")[1]


def test_a_heartbeat_tells_of_ranks_on_other_machines(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    attempt = shelf.attempt(run)
    shelf.beat(attempt, age=5)
    assert view_of(run).state == "running"
    shelf.beat(attempt, age=500)
    assert view_of(run).state == "failed"


def test_a_job_in_a_queue_waits_until_an_attempt_begins(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    submitted = {"backend": "slurm", "job": "4711", "time": time.time()}
    (run.path / "submitted.json").write_text(json.dumps(submitted))
    assert "waiting in slurm job 4711" in call("runs")[1]
    time.sleep(0.01)
    shelf.attempt(run, ExitCode.AGAIN, "stopped")
    assert view_of(run).state == "stopped"


def test_a_job_that_left_the_queue_waits_no_more(
    shelf: Shelf, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shelf.run("a/1")
    (run.path / "submitted.json").write_text('{"backend": "slurm", "job": "47", "time": 9e9}')
    tool = tmp_path / "squeue"
    tool.write_text("#!/bin/sh\necho 46 46\necho 471 47\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(queue, "_answer", (0.0, None))
    assert view_of(run).state == "waiting"
    tool.write_text("#!/bin/sh\necho 46 46\n")
    assert view_of(run).state == "waiting"  # an answer holds for a while
    monkeypatch.setattr(queue, "_answer", (0.0, None))
    assert (view_of(run).state, view_of(run).reason) == ("failed", "slurm job 47 left the queue")
    tool.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(queue, "_answer", (0.0, None))
    assert view_of(run).state == "waiting"


def test_a_job_that_is_to_come_back_waits(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shelf.run("a/1")
    (run.path / "submitted.json").write_text('{"backend": "slurm", "job": "47", "time": 1}')
    attempt = shelf.attempt(run)
    stopped = Outcome(ExitCode.AGAIN, "stopped", 3)
    for following, listed, state in (
        ("again", {"47"}, "waiting"),
        ("again", set(), "stopped"),
        ("stop", {"47"}, "stopped"),
    ):
        attempt.event("end", **stopped.to_dict(), next=following, why="x")
        monkeypatch.setattr(queue, "_answer", (time.time(), frozenset(listed)))
        assert view_of(run).state == state


def test_between_two_attempts_elsewhere_it_still_runs(shelf: Shelf) -> None:
    run = shelf.run("a/1")
    attempt = shelf.attempt(run)
    outcome = Outcome(ExitCode.AGAIN, "a rank was killed", 3)
    attempt.event("end", **outcome.to_dict(), next="again", why="failure 1 of 3 allowed")
    assert view_of(run).state == "failed"
    (run.path / "supervisor.json").write_text('{"host": "another-machine", "pid": 1}')
    assert (view_of(run).state, view_of(run).reason) == ("running", "between two attempts")


def test_the_page_says_what_followed_and_what_was_seen(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    attempt = shelf.attempt(run)
    attempt.event("slow rank", rank=3, share=0.25)
    outcome = Outcome(ExitCode.HANG, "hang", 3, "Rank 3 hangs.")
    attempt.event("end", **outcome.to_dict(), next="stop", why="4 failures are more than 3")
    out = call("status", "a")[1]
    assert "slow rank: rank 3, share 0.25" in out
    assert "after step 3: Rank 3 hangs. -> not started again (4 failures are more than 3)" in out


def test_damage_is_no_reason_to_fail(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    attempt = shelf.attempt(run)
    run.config_file.write_text("train: [")
    (attempt.path / "events.jsonl").write_text('{"event": "end", "code": 999}\n{"ev')
    (attempt.path / "heartbeat-00000.json").write_text("{}")
    (run.path / "metrics.jsonl").write_text('\x00\n{"step": 4, "loss": null}\n{"st')
    (run.path / "lineage.json").write_text("[]")
    code, out, _ = call("runs")
    assert code == 0 and table(out)["a/1"][-3:] == ["4/?", *table(out)["a/1"][-2:]]
    assert call("status", "a/1")[0] == 0


def test_a_run_goes_by_four_names(shelf: Shelf, call: Call) -> None:
    shelf.run("tiny/20260101-000000-aaaaaa")
    newer = shelf.run("tiny/20260102-000000-bbbbbb")
    shelf.run("big/20260103-000000-cccccc")
    label = f"tiny/{newer.path.name}"
    for name in (newer.path, f"runs/{label}", label, newer.path.name, "tiny", "tiny/", "runs/tiny"):
        code, out, _ = call("status", name)
        assert code == 0 and out.startswith(f"{label}: "), name
    code, out, _ = call("status", "tiny", "--runs-dir", shelf.runs_dir)
    assert code == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinny", "did you mean tiny?"),
        ("tiny/20260101-000000-aaaaab", "did you mean tiny/20260101-000000-aaaaaa?"),
        ("zzz", "the newest is big/same"),
        ("same", "names 2 runs; use one of big/same, tiny/same"),
    ],
)
def test_a_wrong_name_gets_a_hint(shelf: Shelf, call: Call, name: str, message: str) -> None:
    shelf.run("tiny/20260101-000000-aaaaaa")
    shelf.run("tiny/same")
    shelf.run("big/same")
    code, out, err = call("status", name)
    assert (code, out) == (ExitCode.USAGE, "") and message in err


def test_without_runs_it_says_where_it_looked(shelf: Shelf, call: Call) -> None:
    code, _, err = call("status", "x")
    assert code == ExitCode.USAGE and "runs holds no run" in err
    code, _, err = call("status", "x", "--runs-dir", "gone")
    assert code == ExitCode.USAGE and "gone does not exist" in err
    assert call("runs")[:2] == (
        0,
        "runs holds no run yet; dsv41-train +experiment=tiny makes one\n",
    )
    assert call("runs", "gone")[0] == ExitCode.USAGE


def test_the_page_of_a_running_run(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1", records=30)
    shelf.attempt(run, ExitCode.HANG, "hang", 12)
    attempt = shelf.attempt(run)
    shelf.beat(attempt)
    shelf.beat(attempt, 1, phase="all-reduce", pid=6)
    supervisor = {"pid": 77, "host": "head", "started": 0, "backend": "slurm", "job": "4711"}
    (run.path / "supervisor.json").write_text(json.dumps(supervisor))
    (run.path / "checkpoints" / "step_00000020").mkdir()
    with run.held():
        _, out, _ = call("status", "a/1")
    assert out.startswith("a/1: running (forward), step 30 of 90 (33 %), about 2m 00s left\n")
    assert "process 77 on head (slurm, job 4711)" in out
    assert "hang (exit code 76) after step 12: because of hang" in out
    assert "working" in out and "loss 7.000" in out
    assert "step_00000020" in out and "damaged" in out  # it has no manifest
    assert "rank 1     step 3  all-reduce for 4s" in out
    assert "dsv41 logs runs/a/1 -f" in out and "dsv41 stop runs/a/1" in out


def test_of_many_ranks_those_that_stand_out(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    attempt = shelf.attempt(run)
    for rank in range(20):
        shelf.beat(attempt, rank, phase="data" if rank == 13 else "all-reduce")
    with run.held():
        _, out, _ = call("status", "a/1")
    assert "20 ranks, most in all-reduce, at step 3" in out
    assert [line.split()[1] for line in out.splitlines() if " rank " in line] == ["13"]


@pytest.mark.parametrize(
    ("code", "reason", "command"),
    [
        (ExitCode.DONE, "done", "dsv41 resume runs/a/1 train.steps=180"),
        (ExitCode.AGAIN, "stopped", "resume       dsv41 resume runs/a/1\n"),
        (ExitCode.BUG, "bug", "log          dsv41 logs runs/a/1\n"),
        (ExitCode.DIVERGED, "diverged", "dsv41 resume runs/a/1 NAME=VALUE"),
    ],
)
def test_what_comes_next(
    shelf: Shelf, call: Call, code: ExitCode, reason: str, command: str
) -> None:
    shelf.attempt(shelf.run("a/1"), code, reason, 9)
    assert command in call("status", "a/1")[1]


def test_looking_does_not_get_in_the_way_of_a_start(shelf: Shelf) -> None:
    run = shelf.run("a/1")
    looks = "import sys; from launcher.run_dir import RunFolder; from pathlib import Path\n"
    looks += "print(flush=True)\nwhile True: RunFolder(Path(sys.argv[1])).is_held()"
    process = subprocess.Popen(
        [sys.executable, "-c", looks, str(run.path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HOME)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        for _ in range(10):
            with run.held() as ours:
                assert ours
    finally:
        process.kill()
        process.wait()


def test_looking_needs_no_torch(shelf: Shelf) -> None:
    shelf.attempt(shelf.run("a/1", records=1), ExitCode.DONE, "done", 1)
    program = f"""
import sys
from launcher import tools
assert tools.main(["runs", {str(shelf.runs_dir)!r}]) == 0
assert tools.main(["status", "a", "--runs-dir", {str(shelf.runs_dir)!r}]) == 0
assert tools.main(["logs", "a", "--runs-dir", {str(shelf.runs_dir)!r}]) == 0
assert not {{"torch", "hydra", "omegaconf"}} & set(sys.modules), sys.modules.keys()
"""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
