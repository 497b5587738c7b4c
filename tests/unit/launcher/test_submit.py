"""What a command does around the training itself."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import submit as module
from launcher.config import TorchrunConfig
from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, RunFolder
from launcher.submit import command_words, submit
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome


@pytest.fixture
def trained(monkeypatch) -> list[Attempt]:
    """Replaces the training; the list holds the attempts that were run."""
    attempts: list[Attempt] = []

    def run_here(config: RunConfig, folder: RunFolder, attempt: Attempt) -> Outcome:
        attempts.append(attempt)
        attempt.log(0).write_text("")
        code = ExitCode(config.seed)  # a test chooses the end by the seed
        outcome = Outcome(code, code.name.lower(), 0, f"ended with {code.value}")
        attempt.write_outcome(0, outcome)
        return outcome

    monkeypatch.setattr(module, "run_here", run_here)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    return attempts


@pytest.mark.parametrize("code", [65, 73, 74, 78])
def test_a_run_that_could_not_begin_leaves_nothing(
    tiny: RunConfig, trained, capsys, code: int
) -> None:
    outcome = submit(replace(tiny, seed=code), overrides=[])
    assert outcome.code == code
    assert f"ended with {code}" in capsys.readouterr().err
    assert not Path(tiny.runs_dir).exists()


@pytest.mark.parametrize("code", [0, 70, 75, 77, 130])
def test_other_runs_stay(tiny: RunConfig, trained, capsys, code: int) -> None:
    submit(replace(tiny, seed=code), overrides=[])
    (attempt,) = trained
    assert [line.split('"')[7] for line in (attempt.path / "events.jsonl").open()] == [
        "start",
        "end",
    ]
    shown = capsys.readouterr()
    assert f"Run     {attempt.path.parents[1]}" in (shown.err if code else shown.out)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def nowhere(config: RunConfig, place: str, port: int) -> RunConfig:
    """The run where it cannot be begun."""
    launcher = config.launcher
    ray = replace(launcher.ray, address="127.0.0.1:1")
    other = {
        "port": {"kind": "torchrun", "torchrun": TorchrunConfig(port=port)},
        "host": {"kind": "torchrun", "torchrun": TorchrunConfig(host="no.such.host.invalid")},
        "ray": {"kind": "ray", "ray": ray},
    }
    return replace(config, launcher=replace(launcher, **other[place]))


@pytest.mark.parametrize(
    ("place", "reason", "told"),
    [
        ("port", "refused", "taken (Address already in use).\nUse another launcher.torchrun.port"),
        ("host", "refused", "no.such.host.invalid does not resolve"),
        ("ray", "not started", "cluster at 127.0.0.1:1 cannot be reached: Connection refused."),
    ],
)
def test_a_refused_start_leaves_nothing_of_a_new_run(
    tiny: RunConfig, taken: int, capsys, place: str, reason: str, told: str
) -> None:
    outcome = submit(nowhere(tiny, place, taken), overrides=[])
    assert (outcome.code, outcome.reason) == (ExitCode.CONFIG, reason)
    shown = capsys.readouterr().err
    assert shown.startswith("dsv41-train: ") and told in shown and "Log " not in shown
    assert not Path(tiny.runs_dir).exists()


def test_a_refused_start_leaves_an_older_run_as_it_was(
    tiny: RunConfig, trained, taken: int, capsys
) -> None:
    config = replace(tiny, seed=75, resume="auto")
    submit(config, overrides=[])
    folder = RunFolder(trained[0].path.parents[1])
    assert submit(nowhere(config, "port", taken), overrides=[]).code == ExitCode.CONFIG
    assert "is taken" in capsys.readouterr().err
    assert folder.last_attempt() == 2 and folder.attempt(2).ending() == "stop"
    assert folder.attempt(2).events()[-1]["reason"] == "refused"


def test_an_attempt_that_cannot_be_made_leaves_nothing_of_a_new_run(
    tiny: RunConfig, trained, monkeypatch, capsys
) -> None:
    def full(self, values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Attempt, "write_given", full)
    assert submit(tiny, overrides=[]).code == ExitCode.CANNOT_CREATE
    assert "No space left on device" in capsys.readouterr().err
    assert not Path(tiny.runs_dir).exists()


def test_a_later_attempt_that_cannot_begin_stays(tiny: RunConfig, trained) -> None:
    config = replace(tiny, seed=75, resume="auto")
    submit(config, overrides=[])
    folder = RunFolder(trained[0].path.parents[1])
    folder.config_file.write_text(folder.config_file.read_text().replace("seed: 75", "seed: 78"))
    submit(replace(config, seed=78), overrides=[])
    assert [a.path.parents[1] for a in trained] == [folder.path] * 2
    assert folder.path.is_dir()


def test_processes_started_by_a_run_find_its_snapshot(tiny: RunConfig, trained) -> None:
    import os

    submit(replace(tiny, seed=0), overrides=[])
    assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONPATH"] == str(trained[0].path.parents[1] / "code")


def test_a_refusal_is_an_outcome(tiny: RunConfig, trained, capsys) -> None:
    submit(replace(tiny, seed=0, id="x"), overrides=[])
    outcome = submit(replace(tiny, seed=0, id="x"), overrides=[])
    assert outcome.code == ExitCode.CONFIG
    assert "resume=auto" in capsys.readouterr().err
    assert len(trained) == 1


def test_changed_code_is_told(tiny: RunConfig, trained, capsys) -> None:
    config = replace(tiny, seed=75, resume="auto")
    submit(config, overrides=[])
    assert "The code has changed" not in capsys.readouterr().out
    snapshot = trained[0].path.parents[1] / "code"
    (snapshot / "model" / "config.py").write_text("")
    submit(config, overrides=[])
    assert "The code has changed" in capsys.readouterr().out


def test_the_command_can_be_typed_from_here(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "bin" / "dsv41-train"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert command_words(str(program)) == ["dsv41-train"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert command_words(str(program)) == [str(program)]
    monkeypatch.chdir(tmp_path)
    assert command_words(str(program)) == ["bin/dsv41-train"]
    assert command_words("/x/launcher/cli.py") == [sys.executable, "-m", "launcher.cli"]
