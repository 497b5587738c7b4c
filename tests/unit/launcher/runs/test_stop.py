"""`dsv41 stop`, against processes that hold a run and end as ranks and supervisors do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.own_packages import HOME
from launcher.run_dir import Attempt, RunFolder
from launcher.runs import queue, stop
from trainer.exit_codes import ExitCode
from trainer.signals import requested_stop, wanted_now

from .conftest import HOST, Called, Shelf

Call = Callable[..., Called]

# Works on a run like a rank that is the command's own process: it ends when it is asked by the
# file, or at a second signal. With "busy" it is in the middle of a step and minds signals alone.
HOLDER = """
import json, os, signal, socket, sys, time
from pathlib import Path
from launcher.run_dir import RunFolder
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

folder, signals = RunFolder(Path(sys.argv[1])), []
signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
with folder.held() as ours:
    assert ours
    attempt = folder.new_attempt()
    attempt.event("start", backend=sys.argv[4], ranks=1, host=sys.argv[3], pid=os.getpid())
    print("ready", flush=True)
    while len(signals) < 2 and (sys.argv[2] == "busy" or not attempt.stop_file.exists()):
        time.sleep(0.02)
    code = json.loads(attempt.stop_file.read_text())["code"]
    outcome = Outcome(ExitCode(code), "stopped", 7)
    attempt.write_outcome(0, outcome)
    attempt.event("end", **outcome.to_dict())
    print(len(signals), flush=True)
"""

Holding = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def holding() -> Iterator[Holding]:
    """holding(run, "busy", host, backend): a process that works on the run."""
    started: list[subprocess.Popen[str]] = []

    def start(
        run: RunFolder, ears: str = "", host: str | None = None, backend: str = "local"
    ) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLDER, str(run.path), ears]
        words += [host or socket.gethostname(), backend]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(HOME)}
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def asked(attempt: Attempt) -> dict[str, object]:
    return json.loads(attempt.stop_file.read_text())


def test_it_asks_waits_and_reports(shelf: Shelf, call: Call, holding: Holding) -> None:
    run = shelf.run("a/1")
    holding(run)
    code, out, err = call("stop", "a")
    assert code == 0
    assert out == "a/1: stopped, step 7\nResume  dsv41 resume runs/a/1\n"
    assert "after the step under way, with a checkpoint" in err
    assert asked(run.attempt(1)) == {
        "code": ExitCode.INTERRUPTED,
        "why": "dsv41 stop",
        "now": False,
        "until": None,  # a person may wait for the checkpoint
    }


def test_json_says_how_it_ended(shelf: Shelf, call: Call, holding: Holding) -> None:
    holding(shelf.run("a/1"))
    code, out, err = call("stop", "a", "--json")
    document = json.loads(out)
    assert (code, err) == (document["exit_code"], "") == (0, "")
    assert (document["run"], document["state"], document["step"]) == ("a/1", "stopped", 7)


def test_now_is_a_second_signal(shelf: Shelf, call: Call, holding: Holding) -> None:
    run = shelf.run("a/1")
    process = holding(run, "busy")
    code, out, err = call("stop", "a", "--now")
    assert code == 0 and out.startswith("a/1: stopped, step 7") and "at once" in err
    assert wanted_now(run.attempt(1).stop_file)
    assert process.stdout is not None and process.stdout.readline() == "2\n"


@pytest.mark.parametrize("where", [{"host": "another-machine"}, {"backend": "torchrun"}])
def test_elsewhere_and_of_a_supervisor_only_the_file_asks(
    shelf: Shelf, call: Call, holding: Holding, where: dict[str, str]
) -> None:
    """To a supervisor a first signal would mean: with a checkpoint."""
    run = shelf.run("a/1")
    process = holding(run, **where)
    assert stop.Holder.of(run) is None
    assert call("stop", "a", "--now")[0] == 0
    assert process.stdout is not None and process.stdout.readline() == "0\n"


def test_no_signal_reaches_a_process_that_has_another_ones_number(shelf: Shelf) -> None:
    run = shelf.run("a/1")
    attempt = run.new_attempt()
    attempt.event("start", backend="local", host=socket.gethostname(), pid=os.getpid())
    assert stop.Holder.of(run) is None
    with run.held():
        assert stop.Holder.of(run) == stop.Holder(os.getpid(), run.path.resolve())


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (ExitCode.DONE, "done", "a/1 is not running (done)"),
        (ExitCode.IO_ERROR, "disk full", "a/1 is not running (failed: disk full)"),
        (None, "", "a/1 is not running (failed: ended without a word)"),
    ],
)
def test_what_does_not_run_is_not_stopped(
    shelf: Shelf, call: Call, code: ExitCode | None, reason: str, message: str
) -> None:
    attempt = shelf.attempt(shelf.run("a/1"), code, reason)
    assert call("stop", "a") == (ExitCode.USAGE, "", f"dsv41 stop: {message}\n")
    assert not attempt.stop_file.exists()


def test_a_run_that_a_cluster_may_start_again_finds_the_wish(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    attempt = run.new_attempt()
    attempt.event("start", backend="ray", host=HOST, pid=1)
    run.submission_file.write_text("{}")
    lost = "failed: supervisor lost, the Ray cluster may start it again"
    assert f"a/1: {lost}, step 0" in call("status", "a")[1]
    code, out, err = call("stop", "a")
    assert code == 0 and out.startswith("a/1: stopped, step 0\n")
    assert err == "asked a/1, which is lost: if its supervisor is started again, it ends\n"
    assert requested_stop(attempt.stop_file) == ExitCode.INTERRUPTED
    attempt.stop_file.unlink()
    run.ended_file.write_text("{}")
    assert "a/1: failed: ended without a word" in call("status", "a")[1]
    assert call("stop", "a")[0] == ExitCode.USAGE


def test_a_job_in_a_queue_is_taken_out_of_it(
    shelf: Shelf, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shelf.run("a/1")
    submitted = {"backend": "slurm", "job": "12_3", "time": 1e12}
    (run.path / "submitted.json").write_text(json.dumps(submitted))
    for name, script in (("squeue", "echo 15 12 12_3"), ("scancel", "echo not yours >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(queue, "_answer", (0.0, None))
    code, _, err = call("stop", "a")
    assert code == ExitCode.CONFIG
    assert "waiting in slurm job 12_3, which does not let go of it: not yours" in err
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    code, out, _ = call("stop", "a")
    assert code == 0 and out.startswith("a/1: stopped, step 0\n")
    assert (tmp_path / "asked").read_text() == "12_3\n"
    assert call("stop", "a")[0] == ExitCode.USAGE


def test_an_end_at_once_that_was_asked_for_is_no_failure(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    shelf.attempt(run).stop_file.write_text("{}")
    assert call("runs")[1].splitlines()[1].split()[1] == "stopped"
