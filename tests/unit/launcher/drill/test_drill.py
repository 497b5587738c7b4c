"""What a drill rehearses, and how it judges what it has seen."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.drill import command
from launcher.drill.cases import CASES, EVERY, LATER, MIDDLE, SAVED, STEPS
from launcher.drill.rehearse import Seen, compared, expected, rehearse
from launcher.run_dir import RunFolder
from trainer import faults
from trainer.checkpoint.manifest import entry_of, write_manifest
from trainer.exit_codes import ExitCode

KILL = next(case for case in CASES if case.name == "kill")


def test_every_case_is_a_fault_that_can_happen() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert EVERY < MIDDLE < SAVED == 2 * EVERY < LATER <= STEPS
    for case in CASES:
        found = faults.parse(case.faults.format(last=3))
        assert found and all(fault.conditions["attempt"] == 1 for fault in found)
        assert {fault.conditions["rank"] for fault in found} <= {0, 3}


def test_the_list_names_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(list=True)
    assert command.run(args) == ExitCode.DONE
    out = capsys.readouterr().out
    for name in (*(case.name for case in CASES), *faults.ACTIONS, *faults.POINTS):
        assert f"\n{name} " in out


@pytest.mark.parametrize(
    ("seen", "good"),
    [
        (Seen("a rank was killed", 3, 0, "equal"), True),
        (Seen("a rank was killed", 3, 0, "close"), True),
        (Seen("a rank was killed", 3, 0, "different"), False),
        (Seen("a rank was killed", None, 0, "equal"), False),
        (Seen("hang", 3, 0, "equal"), False),
        (Seen("a rank was killed", 3, 75, "different"), False),
    ],
)
def test_what_was_seen_is_compared_with_what_was_promised(seen: Seen, good: bool) -> None:
    assert seen.as_expected(KILL) is good
    assert (seen.text == expected(KILL)) is (good and seen.same == "equal")


def a_run(folder: Path, losses: list[float], *, bits: str = "aa", tokens: int = 9) -> RunFolder:
    run = RunFolder(folder)
    checkpoint = folder / "checkpoints" / f"step_{STEPS:08d}"
    checkpoint.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "tokens": tokens, "step_s": step / 7}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (checkpoint / "__0_0.distcp").write_text(bits)
    (checkpoint / "state.json").write_text(str(folder))  # may differ
    write_manifest(checkpoint, {path.name: entry_of(path) for path in checkpoint.iterdir()})
    return run


def test_a_run_is_compared_by_its_records_and_its_bits(tmp_path: Path) -> None:
    through = a_run(tmp_path / "through", [6.0, 5.0])
    assert compared(a_run(tmp_path / "same", [6.0, 5.0]), through) == "equal"
    assert compared(a_run(tmp_path / "bits", [6.0, 5.0], bits="ab"), through) == "close"
    assert compared(a_run(tmp_path / "rounding", [6.0, 5.001], bits="ab"), through) == "close"
    assert compared(a_run(tmp_path / "loss", [6.0, 5.1], bits="ab"), through) == "different"
    assert compared(a_run(tmp_path / "short", [6.0]), through) == "different"
    assert compared(a_run(tmp_path / "samples", [6.0, 5.0], tokens=8), through) == "different"


def test_a_run_goes_on_until_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand where nobody supervises: the command dies, and is started once more."""
    through = a_run(tmp_path / "through", [6.0, 5.0])
    started: list[str] = []

    def train(words: list[str], run: RunFolder, *, faults: str = "") -> int:
        started.append(faults)
        attempt = run.attempt(len(started))
        attempt.path.mkdir(parents=True)
        if faults:
            a_run(run.path, [6.0, 5.0])
            run.config_file.write_text("")
            return -9
        attempt.log(0).write_text("resuming after step 3 from somewhere\n")
        return 0

    monkeypatch.setattr("launcher.drill.rehearse.train", train)
    seen = rehearse(KILL, ["a=1"], RunFolder(tmp_path / "run"), through=through, last=1)
    assert seen == Seen("a rank was killed", 3, 0, "equal")
    assert started == ["kill@forward,rank=1,step=5,attempt=1", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a run's folder, or the words that start a run"),
        (["nowhere"], "nowhere is no run's folder"),
    ],
)
def test_what_cannot_be_drilled_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # where there are no runs
    args = argparse.Namespace(list=False, words=words, config_dir=None, case=None, keep=False)
    assert command.run(args) == ExitCode.USAGE
    assert message in capsys.readouterr().err
