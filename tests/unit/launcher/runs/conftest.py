"""Made-up folders of runs: what an attempt leaves, without any training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher import tools
from launcher.run_dir import Attempt, RunFolder
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

Called = tuple[int, str, str]
HOST = "node7"


@dataclass
class Shelf:
    """A folder of runs; each run that is made is a second newer than the one before."""

    runs_dir: Path
    made: list[RunFolder] = field(default_factory=list)

    def run(self, label: str, *, steps: int = 90, records: int = 0) -> RunFolder:
        folder = RunFolder(self.runs_dir / label)
        for part in ("attempts", "checkpoints"):
            (folder.path / part).mkdir(parents=True)
        folder.config_file.write_text(f"name: x\ntrain:\n  steps: {steps}\n")
        stamp = time.time() - 10_000 + len(self.made)
        os.utime(folder.config_file, (stamp, stamp))
        for step in range(1, records + 1):
            self.record(folder, step)
        self.made.append(folder)
        return folder

    def record(self, folder: RunFolder, step: int) -> None:
        figures = {"loss": 10 - step / 10, "tokens_per_s": 1000.0 + step, "step_s": 2.0, "lr": 1e-3}
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")

    def attempt(
        self, folder: RunFolder, code: ExitCode | None = None, reason: str = "x", step: int = 0
    ) -> Attempt:
        """An attempt that ended with `code`; None = it works, or died without a word."""
        attempt = folder.new_attempt()
        attempt.event("start", backend="local", ranks=1, host=HOST, pid=1)
        attempt.log(0).write_text(f"log of attempt {attempt.number}\n")
        if code is not None:
            outcome = Outcome(code, reason, step, f"because of {reason}")
            attempt.write_outcome(0, outcome)
            attempt.event("end", **outcome.to_dict())
        return attempt

    def beat(self, attempt: Attempt, rank: int = 0, *, age: float = 0.0, **what: object) -> None:
        now = time.time() - age
        beat = {"rank": rank, "pid": 5, "host": HOST, "time": now, "step": 3}
        beat |= {"phase": "forward", "phase_since": now - 4, **what}
        file = attempt.path / f"heartbeat-{rank:05d}.json"
        file.write_text(json.dumps(beat))
        os.utime(file, (now, now))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    (tmp_path / "runs").mkdir()
    return Shelf(tmp_path / "runs")


@pytest.fixture
def call(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Called]:
    """call("status", "x"): the command's exit code and output, in the folder that holds runs/."""
    monkeypatch.chdir(shelf.runs_dir.parent)

    def called(*words: object) -> Called:
        code = tools.main([str(word) for word in words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return called
