"""`dsv41 resume`: when it is the same run, when a new one, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import submit, tools
from launcher.own_packages import HOME
from launcher.resume import continued
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder, create
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome
from trainer.state import TrainState

Resume = Callable[..., int]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What would have been trained: ("same", folder, now) or ("new", config, checkpoint, words)."""
    made: list[tuple] = []

    def go_on(folder: RunFolder, now: Mapping[str, object]) -> Outcome:
        made.append(("same", folder, now))
        return Outcome(ExitCode.AGAIN, "stopped", 3)

    def begin_at(
        config: RunConfig, checkpoint: Path, *, overrides: Sequence[str], flags: Sequence[str]
    ) -> tuple[RunFolder, Outcome]:
        made.append(("new", config, checkpoint, list(overrides)))
        os.write(1, b"from a rank\n")
        return create(config, overrides=overrides).folder, Outcome(ExitCode.DONE, "done", 9)

    monkeypatch.setattr(submit, "go_on", go_on)
    monkeypatch.setattr(submit, "begin_at", begin_at)
    return made


@pytest.fixture
def run(tiny: RunConfig) -> RunFolder:
    """A run of +experiment=tiny with a checkpoint of step 4."""
    folder = create(tiny, overrides=["+experiment=tiny"]).folder
    path = folder.path / "checkpoints" / "step_00000004"
    path.mkdir()
    file = TrainState(1, 2, "d", "p", step=4).write(path)
    from trainer.checkpoint.manifest import entry_of, write_manifest

    write_manifest(path, {file.name: entry_of(file)})
    return folder


def resume(run: RunFolder, *words: str) -> int:
    return tools.main(["resume", str(run.path), *words])


def test_without_changes_it_is_the_same_run(run: RunFolder, calls: list[tuple]) -> None:
    assert resume(run) == ExitCode.AGAIN
    ((kind, folder, now),) = calls
    assert (kind, folder) == ("same", run) and now["data"]["accept_changed"] is False


def test_words_that_change_nothing_are_no_reason_for_a_new_one(
    run: RunFolder, calls: list[tuple], capfd
) -> None:
    resume(run, "seed=1")
    assert calls[0][0] == "same" and "seed=1 changes nothing" in capfd.readouterr().out
    resume(run, "data.accept_changed=true")
    assert calls[1][0] == "same" and calls[1][2]["data"]["accept_changed"] is True


def test_with_changes_it_is_a_new_run_beside_it(
    run: RunFolder, tiny: RunConfig, calls: list[tuple], capfd
) -> None:
    assert resume(run, "train.steps=200", "optim.weight_decay=0.5") == ExitCode.DONE
    ((kind, config, checkpoint, words),) = calls
    assert kind == "new" and checkpoint == run.path / "checkpoints" / "step_00000004"
    assert words == ["+experiment=tiny", "train.steps=200", "optim.weight_decay=0.5"]
    expected = replace(
        tiny,
        train=replace(tiny.train, steps=200),
        optim=replace(tiny.optim, weight_decay=0.5),
    )
    assert config == expected and config.id is None
    assert "train.steps: 90 -> 200" in capfd.readouterr().out


def test_another_launch_is_the_same_run(run: RunFolder, calls: list[tuple], capfd) -> None:
    """And stays with it, until something else is asked for."""
    before = run.config_file.read_text()
    words = ("launcher=torchrun", "launcher.torchrun.port=29500", "resilience.grace_s=9")
    resume(run, *words, "logging.every=5")
    kind, folder, now = calls[0]
    assert (kind, folder) == ("same", run) and set(now) == {
        *("data", "launcher", "resilience", "logging")
    }
    assert continued(run, now).launcher.torchrun.port == 29500
    told = capfd.readouterr().out
    assert "launcher.kind: local -> torchrun" in told and "logging.every: 1 -> 5" in told

    run.new_attempt().write_given(now)
    resume(run)
    assert calls[1][2] == now and "launcher" not in capfd.readouterr().out
    resume(run, "launcher.torchrun.port=null", "logging.every=1")  # as it was made
    again = continued(run, calls[2][2])
    assert (again.launcher.kind, again.launcher.torchrun.port) == ("torchrun", None)
    assert (again.resilience.grace_s, again.logging.every) == (9, 1)
    resume(run, "launcher=local")
    assert "launcher" not in calls[3][2]
    assert run.config_file.read_text() == before
    assert [kind for kind, *_ in calls] == ["same"] * 4


def test_a_new_run_is_launched_like_its_parent(run: RunFolder, calls: list[tuple], capfd) -> None:
    resume(run, "launcher=torchrun")
    run.new_attempt().write_given(calls[0][2])
    resume(run, "train.steps=200", "resilience.grace_s=9")
    kind, config, *_ = calls[1]
    assert (kind, config.launcher.kind, config.train.steps) == ("new", "torchrun", 200)
    told = capfd.readouterr().out.partition("A new run begins with")[2]
    assert "train.steps: 90 -> 200" in told and "resilience.grace_s: 60.0 -> 9.0" in told


def test_json_alone_is_on_standard_output(run: RunFolder, calls: list[tuple], capfd) -> None:
    assert resume(run, "--json", "train.steps=200", "id=mine") == ExitCode.DONE
    shown = capfd.readouterr()
    document = json.loads(shown.out)
    assert document["exit_code"] == 0 and document["run"] == "tiny/mine"
    assert "from a rank" in shown.err and "A new run begins with" in shown.err


def test_everything_that_is_against_it_is_told_at_once(
    run: RunFolder, calls: list[tuple], capfd
) -> None:
    assert resume(run, "seed=2", "train.steps=3", "launcher.nodes=2") == ExitCode.CONFIG
    told = capfd.readouterr().err
    assert "3 problems" in told and "seed: 1 -> 2" in told and "train.steps=3, and" in told
    assert "is a mesh of 1 ranks" in told
    assert calls == [] and len(list(run.path.parent.iterdir())) == 1


def test_without_a_checkpoint_nothing_can_begin(run: RunFolder, calls: list[tuple], capfd) -> None:
    checkpoint = run.path / "checkpoints" / "step_00000004"
    (checkpoint / "trainer.json").write_text("{")
    assert resume(run, "train.steps=200") == ExitCode.IO_ERROR
    assert "No checkpoint of this run is whole" in capfd.readouterr().err
    checkpoint.rename(checkpoint.with_name("step_00000004.damaged-001"))
    assert resume(run, "train.steps=200") == ExitCode.CONFIG
    assert "has no checkpoint to begin with" in capfd.readouterr().err
    assert calls == []


SNAPSHOT = """
import launcher, sys
def add_arguments(parser):
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--json", action="store_true")
def run(args):
    print(args.run, args.overrides, args.json, launcher.__path__[0])
    return 77
"""


def test_the_same_run_goes_on_with_the_code_that_it_was_made_with(run: RunFolder) -> None:
    (run.code / "launcher" / "runs" / "resume.py").write_text(SNAPSHOT)
    done = subprocess.run(
        [sys.executable, "-m", "launcher.tools", "resume", str(run.path), "--json", "seed=1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert done.stdout == f"{run.path} ['seed=1'] True {run.code / 'launcher'}\n"
    assert "The code has changed since" in done.stderr


def test_what_cannot_go_on(run: RunFolder, tiny: RunConfig, capfd) -> None:
    with run.held():
        assert resume(run) == ExitCode.CONFIG
    assert "another process is working on" in capfd.readouterr().err
    attempt = run.new_attempt()
    attempt.write_outcome(0, Outcome(ExitCode.DONE, "done", 90))
    assert resume(run) == ExitCode.CONFIG
    assert "give more: train.steps=180" in capfd.readouterr().err
    assert tools.main(["resume", "gone", "--runs-dir", tiny.runs_dir]) == ExitCode.USAGE
