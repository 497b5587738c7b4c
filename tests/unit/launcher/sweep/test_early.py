"""Points that were stopped since others were better: what is said of them, and left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher import freeze, tools
from launcher.messages import labels
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from launcher.sweep.folder import SweepFolder
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

TEXT = "stopped early by asha at step 9"
ENDS = {  # code and last loss of each point
    "000": (ExitCode.DONE, 3.0),
    "001": (ExitCode.AGAIN, 2.0),  # stopped early, by a value that is not to be compared with
    "002": (ExitCode.BAD_DATA, None),
    "003": (ExitCode.AGAIN, 4.0),  # stopped early, then trained on to its end
}


@pytest.fixture
def sweep(tiny: RunConfig, tmp_path: Path) -> SweepFolder:
    """Made up: what the points of such a sweep leave."""
    overrides = [[f"seed={number}"] for number in range(len(ENDS))]
    points = [
        {"run": name, "overrides": words, "label": label}
        for name, words, label in zip(ENDS, overrides, labels(overrides), strict=True)
    ]
    found = SweepFolder(tmp_path / "x-sweep-1")
    for name, (code, loss) in ENDS.items():
        folder = RunFolder(found.path / name)
        folder.attempts.mkdir(parents=True)
        folder.config_file.write_text(freeze.to_yaml(tiny))
        _end(folder, code, step=12)
        if loss is not None:
            line = json.dumps({"step": 12, "loss": loss})
            (folder.path / "metrics.jsonl").write_text(line + "\n")
    found.file.write_text(json.dumps({"metric": "auto", "concurrency": 1, "points": points}))
    for name in ("001", "003"):
        (found.path / name / "point.early").write_text(TEXT + "\n")
    _end(RunFolder(found.path / "003"), ExitCode.DONE, step=90)
    return found


def _end(folder: RunFolder, code: ExitCode, *, step: int) -> None:
    attempt, outcome = folder.new_attempt(), Outcome(code, "stopped", step)
    attempt.event("start", backend="ray", ranks=1)
    attempt.write_outcome(0, outcome)
    attempt.event("end", **outcome.to_dict(), next="stop")


def test_the_table_says_so(sweep: SweepFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["sweep", "status", str(sweep.path)]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[1:]]
    told = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert told[0] == ["000", "done", "12/90", "3.0000 *", "seed=0"]
    assert told[1] == ["001", TEXT, "12/90", "2.0000", "seed=1"]
    assert told[3] == ["003", "done", "12/90", "4.0000", "seed=3"]

    assert tools.main(["sweep", "status", str(sweep.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(point["state"], point["reason"]) for point in found][1] == ("stopped", TEXT)


def test_they_are_not_run_again_nor_the_best(
    sweep: SweepFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(
        "launcher.sweep.running.run_points",
        lambda sweep, points: tried.extend(p.folder.path.name for p in points) or 0,
    )
    assert tools.main(["sweep", "retry", str(sweep.path)]) == 0
    assert tried == ["002"]
    assert tools.main(["sweep", "best", str(sweep.path)]) == 0
    assert "seed=0" in capsys.readouterr().out
