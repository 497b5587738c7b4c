"""`dsv41 logs`: the last lines, and following them over rotations and attempts until the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.own_packages import HOME
from launcher.runs.logs import Tail
from trainer.exit_codes import ExitCode

from .conftest import Called, Shelf

Call = Callable[..., Called]


def numbered(first: int, last: int) -> list[str]:
    return [f"line {n}" for n in range(first, last + 1)]


def write(path: Path, lines: list[str]) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_the_last_lines_of_the_newest_attempt(shelf: Shelf, call: Call) -> None:
    run = shelf.run("a/1")
    first = shelf.attempt(run, ExitCode.AGAIN, "stopped")
    second = shelf.attempt(run)
    write(second.log(0), numbered(1, 100))
    write(second.log(3), ["of rank 3", "and its end"])
    with second.log(3).open("a") as file:
        file.write("cut sh")
    code, out, err = call("logs", "a", "-n", 2)
    assert (code, out, err) == (0, "line 99\nline 100\n", "")
    assert len(call("logs", "a")[1].splitlines()) == 40
    assert call("logs", "a", "-n", 0)[1] == ""
    assert call("logs", "a", "--attempt", 1)[1] == first.log(0).read_text()
    lines = [json.loads(line) for line in call("logs", "a", "--rank", 3, "--json")[1].splitlines()]
    assert [entry["line"] for entry in lines] == ["of rank 3", "and its end", "cut sh"]
    assert lines[0] == {"attempt": 2, "rank": 3, "line": "of rank 3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "5"], "attempt 1 of a/1 has no log of rank 5; it has ranks 0 to 0"),
        (["--attempt", "4"], "has attempts 1 to 1"),
        (["-n", "-1"], "must be 0 or more"),
    ],
)
def test_what_is_not_there(shelf: Shelf, call: Call, words: list[str], message: str) -> None:
    shelf.attempt(shelf.run("a/1"))
    code, out, err = call("logs", "a", *words)
    assert (code, out) == (ExitCode.USAGE, "") and message in err


def test_a_run_that_never_began(shelf: Shelf, call: Call) -> None:
    shelf.run("a/1")
    assert "has no attempt yet" in call("logs", "a")[2]
    code, _, err = call("logs", "a", "-f")
    assert code == ExitCode.USAGE and "was never started" in err


def test_a_tail_loses_nothing_when_the_log_rotates(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    write(log, numbered(1, 5))
    tail = Tail(log)
    assert tail.last(3) == numbered(3, 5)
    write(log, numbered(6, 7))
    log.rename(tmp_path / "rank-00000.log.1")
    assert tail.more() == numbered(6, 7)  # the new one is not there yet
    write(log, numbered(8, 9))
    assert tail.more() == numbered(8, 9)
    log.write_text("after a cut\n")
    assert tail.more() == ["after a cut"]
    with log.open("a") as file:
        file.write("half")
        file.flush()
        assert tail.more() == []
        file.write(" a line")
    assert tail.rest() == ["half a line"]


def test_the_last_lines_reach_into_older_parts(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    for age, (name, lines) in enumerate(
        [(".2", numbered(1, 4)), (".1", numbered(5, 8)), ("", numbered(9, 10))]
    ):
        write(tmp_path / f"rank-00000.log{name}", lines)
        os.utime(tmp_path / f"rank-00000.log{name}", (1000 + age, 1000 + age))
    assert Tail(log).last(4) == numbered(7, 10)
    assert Tail(log).last(100) == numbered(1, 10)


def follow(shelf: Shelf, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.tools", "logs", "a", "-f", *words],
        cwd=shelf.runs_dir.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HOME)},
    )


def test_following_a_run_to_its_end(shelf: Shelf) -> None:
    run = shelf.run("a/1", records=4)
    with run.held():
        first = shelf.attempt(run)
        process = follow(shelf)
        guard = threading.Timer(60, process.kill)
        guard.start()
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "log of attempt 1\n"
        first.log(0).rename(first.path / "rank-00000.log.1")
        write(first.log(0), ["after a rotation"])
        assert process.stdout.readline() == "after a rotation\n"
        second = shelf.attempt(run)
        assert process.stdout.readline() == "log of attempt 2\n"
        write(second.log(0), ["the end"])
        second.event("end", code=0, reason="done", step=90)
    out, err = process.communicate(timeout=60)
    guard.cancel()
    assert process.returncode == 0
    assert out == "the end\n"
    assert err == "== attempt 2\n== a/1: done, step 90\n"


def test_following_one_attempt_ends_with_it(shelf: Shelf) -> None:
    run = shelf.run("a/1")
    with run.held():
        shelf.attempt(run, ExitCode.AGAIN, "stopped", 3)
        shelf.attempt(run)
        process = follow(shelf, "--attempt", "1", "--json")
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out) == {"attempt": 1, "rank": 0, "line": "log of attempt 1"}
