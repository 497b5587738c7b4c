"""A rank leaves its outcome file whatever happens, and a traceback in its log alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.errors import DataError
from launcher import own_packages, worker
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, create
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    (tmp_path / "001").mkdir()
    return Attempt(tmp_path / "001")


def test_an_outcome_is_written_as_it_is(attempt: Attempt, capsys) -> None:
    outcome = Outcome(ExitCode.DONE, "done", 3)
    assert (
        worker.run_rank(lambda settle: print("hello") or outcome, attempt=attempt, rank=0)
        == outcome
    )
    assert attempt.outcome(0) == outcome
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("deep down"), ExitCode.BUG),
        (ValueError("deep down"), ExitCode.CONFIG),
        (KeyboardInterrupt("deep down"), ExitCode.INTERRUPTED),
        (SystemExit("deep down"), ExitCode.BUG),
    ],
)
def test_every_exception_becomes_an_outcome(
    attempt: Attempt, capsys, error: BaseException, code: ExitCode
) -> None:
    def work(settle: Callable[[], None]) -> Outcome:
        raise error

    assert worker.run_rank(work, attempt=attempt, rank=0).code == code
    written = attempt.outcome(0)
    assert written is not None
    assert written.code == code
    assert "Traceback" in attempt.log(0).read_text()
    assert "deep down" in attempt.log(0).read_text()
    assert "Traceback" not in "".join(capsys.readouterr())


def test_other_ranks_do_not_speak(attempt: Attempt, capsys) -> None:
    worker.run_rank(
        lambda settle: print("hello") or Outcome(ExitCode.DONE, "done", 3), attempt=attempt, rank=1
    )
    assert capsys.readouterr().out == ""
    assert "hello" in attempt.log(1).read_text()
    assert attempt.outcome(1) is not None


def test_an_outcome_that_cannot_be_written_keeps_its_code(attempt: Attempt, capsys) -> None:
    attempt.outcome_file(0).mkdir()
    outcome = worker.run_rank(
        lambda settle: Outcome(ExitCode.DIVERGED, "diverged", 3), attempt=attempt, rank=0
    )
    assert outcome.code == ExitCode.DIVERGED
    assert "outcome-00000.json" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_during_the_clean_up_does_not_replace_the_cause(
    attempt: Attempt, number: signal.Signals
) -> None:
    """As an agent sends it to the other ranks as soon as it sees that one has died."""

    def work(settle: Callable[[], None]) -> Outcome:
        try:
            raise DataError("line 7")
        finally:
            settle()
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    outcome = worker.run_rank(work, attempt=attempt, rank=0)
    assert (outcome.code, outcome.message) == (ExitCode.BAD_DATA, "line 7")
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("argv", [[], ["--help"], ["a", "b"]])
def test_usage(argv: list[str], capsys) -> None:
    assert worker.main(argv) == ExitCode.USAGE
    assert "RUN_DIR" in capsys.readouterr().err


def test_ranks_need_their_place(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert worker.main([str(tmp_path), "1"]) == ExitCode.USAGE
    assert "RANK" in capsys.readouterr().err


def test_a_folder_that_is_no_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert worker.main([str(tmp_path), "1"]) == ExitCode.CONFIG
    assert "config.yaml" in capsys.readouterr().err


def test_code_from_elsewhere_is_refused(tiny: RunConfig, monkeypatch, capsys) -> None:
    folder = create(tiny, overrides=[]).folder
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert worker.main([str(folder.path), "1"]) == ExitCode.BUG
    assert str(folder.code) in capsys.readouterr().err
    assert folder.attempt(1).outcome(0) is not None


def test_another_world_size_is_refused(tiny: RunConfig, monkeypatch, capsys) -> None:
    folder = create(tiny, overrides=[]).folder
    monkeypatch.setattr(own_packages, "strangers", lambda home: [])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert worker.main([str(folder.path), "1"]) == ExitCode.CONFIG
    assert "WORLD_SIZE=2, but the plan has 1 rank(s)" in capsys.readouterr().err


def test_strangers_are_found(tmp_path: Path, monkeypatch) -> None:
    assert own_packages.strangers(own_packages.HOME) == []
    found = own_packages.strangers(tmp_path)
    assert {text.split(" ")[0] for text in found} == set(own_packages.NAMES) & set(sys.modules)
