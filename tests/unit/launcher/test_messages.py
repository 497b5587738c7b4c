"""The last lines: where things are, and commands that can be typed as they stand."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.messages import closing, next_command, resume_command
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

FOLDER = RunFolder(Path("/runs/tiny/one"))
TYPED = ["dsv41-train", "--config-dir", "my configs", "+experiment=tiny", "data.paths=[a b.txt]"]


def told(outcome: Outcome, config: RunConfig, plot: Path | None = None) -> list[str]:
    text = closing(
        outcome, config, folder=FOLDER, attempt=FOLDER.attempt(2), plot=plot, command=TYPED
    )
    return text.splitlines()


def test_done(tiny: RunConfig) -> None:
    lines = told(Outcome(ExitCode.DONE, "done", 9, "All done."), tiny, Path("/p.png"))
    assert lines[:4] == ["All done.", "", "Run     /runs/tiny/one", "Plot    /p.png"]
    assert lines[4].startswith("Next    dsv41-train --config-dir 'my configs' +experiment=tiny ")
    assert len(lines) == 5


@pytest.mark.parametrize("code", [ExitCode.INTERRUPTED, ExitCode.AGAIN, ExitCode.IO_ERROR])
def test_stopped_says_how_to_go_on(tiny: RunConfig, code: ExitCode) -> None:
    config = replace(tiny, id="one")
    lines = told(Outcome(code, "stopped", 9, "Stopped."), config)
    assert lines[-2] == "Log     /runs/tiny/one/attempts/002/rank-00000.log"
    label, command = lines[-1].split(" ", 1)
    assert label == "Resume"
    assert shlex.split(command) == [*TYPED, "id=one", "resume=auto"]


@pytest.mark.parametrize("code", [ExitCode.DIVERGED, ExitCode.CONFIG, ExitCode.BAD_DATA])
def test_what_would_fail_again_is_not_resumed(tiny: RunConfig, code: ExitCode) -> None:
    assert not any("Resume" in line for line in told(Outcome(code, "x", 9, "m"), tiny))


def test_resume_replaces_what_was_given(tiny: RunConfig) -> None:
    given = ["dsv41-train", "+experiment=tiny", "id=two", "resume=never", "seed=3"]
    assert resume_command(replace(tiny, id="one"), given) == (
        "dsv41-train +experiment=tiny seed=3 id=one resume=auto"
    )


def test_next_is_ones_own_text_and_then_longer(tiny: RunConfig) -> None:
    given = ["dsv41-train", "+experiment=tiny", "id=two", "train.steps=5", "data=embedded"]
    assert shlex.split(next_command(tiny, given)) == [
        *["dsv41-train", "+experiment=tiny", "train.steps=5"],
        *["data=text", "data.paths=[YOUR.txt]", "name=mine"],
    ]
    own = replace(tiny, data=replace(tiny.data, source="text", paths=("a",)))
    assert next_command(own, given).endswith(f"data=embedded train.steps={2 * tiny.train.steps}")
