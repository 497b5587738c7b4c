"""One run through a fault and to its end, and what came of it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.drill.cases import STEPS, Case
from launcher.run_dir import RunFolder
from trainer.checkpoint.manifest import ManifestError, read_manifest
from trainer.exit_codes import ExitCode
from trainer.faults import VARIABLE
from trainer.metrics import read_metrics

GOES_ON = 4  # times a person would start a run again before giving up
CLOSE = 1e-3  # relative; where devices add up in any order, two equal runs differ by less
COMPARED = ("step", "tokens", "tokens_total", "loss", "eval_loss")


@dataclass(frozen=True)
class Seen:
    """ended: how the first attempt ended. resumed: the step that the second went on from, None if
    there was none. code: the command's in the end. same: equal, close or different, to a run that
    nothing interrupted."""

    ended: str
    resumed: int | None
    code: int
    same: str

    def as_expected(self, case: Case) -> bool:
        return (
            (self.ended, self.resumed, self.code) == (case.ended, case.resumes, ExitCode.DONE)
        ) and self.same != "different"

    @property
    def text(self) -> str:
        how = "from nothing" if self.resumed is None else f"from step {self.resumed}"
        end = f"then {self.same}" if self.code == ExitCode.DONE else f"then exit code {self.code}"
        return f"{self.ended}, on {how}, {end}"


def expected(case: Case) -> str:
    return f"{case.ended}, on from step {case.resumes}, then equal"


def log_of(run: RunFolder) -> Path:
    """Beside the run's folder, which the command itself makes."""
    return run.path.parent / f"{run.path.name}.log"


def train(words: Sequence[str], run: RunFolder, *, faults: str = "") -> int:
    """Start the command, wait for its end; its exit code. What it says goes to `log_of(run)`."""
    log = log_of(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "launcher.cli",
                *words,
                f"id={run.path.name}",
                "resume=auto",
            ],
            env=os.environ | {VARIABLE: faults},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def rehearse(
    case: Case, words: Sequence[str], run: RunFolder, *, through: RunFolder, last: int
) -> Seen:
    """Train `run` with the fault, go on until it is done, and compare it with `through`, the run
    that nothing interrupted. last: the last rank."""
    code = train(words, run, faults=case.faults.format(last=last))
    first = _ended(run, code)
    for _ in range(GOES_ON):
        if code == ExitCode.DONE or not run.config_file.is_file():
            break
        code = train(words, run)
    same = compared(run, through) if code == ExitCode.DONE else "different"
    return Seen(first, _resumed(run), code, same)


def compared(run: RunFolder, through: RunFolder) -> str:
    """equal: the same records, and the same bits of every tensor; close: the same samples, and
    losses within CLOSE; else different."""
    ours, theirs = _records(run), _records(through)
    if [r["step"] for r in ours] != [r["step"] for r in theirs]:
        return "different"
    if ours == theirs and _tensors(run) == _tensors(through):
        return "equal"
    for mine, other in zip(ours, theirs, strict=True):
        for key in COMPARED:
            if not _near(mine.get(key), other.get(key), exact="loss" not in key):
                return "different"
    return "close"


def _near(ours: Any, theirs: Any, *, exact: bool) -> bool:
    if exact or ours is None or theirs is None:
        return ours == theirs
    return math.isclose(ours, theirs, rel_tol=CLOSE)


def _records(run: RunFolder) -> list[dict[str, Any]]:
    records = read_metrics(run.path / "metrics.jsonl")
    return [{key: record.get(key) for key in COMPARED} for record in records]


def _tensors(run: RunFolder) -> dict[str, str]:
    """Checksums of the files of the last checkpoint that hold tensors."""
    try:
        files = read_manifest(run.path / "checkpoints" / f"step_{STEPS:08d}")
    except ManifestError:
        return {}
    return {name: entry.sha256 for name, entry in files.items() if name.endswith(".distcp")}


def _ended(run: RunFolder, code: int) -> str:
    """How the first attempt ended; a command that was itself the rank tells only by its code."""
    for event in run.attempt(1).events():
        if event.get("event") == "end":
            return str(event["reason"])
    return "a rank was killed" if code < 0 else f"exit code {code}"


def _resumed(run: RunFolder) -> int | None:
    """The step that the second attempt went on from, by its log."""
    try:
        text = run.attempt(2).log(0).read_text("utf-8", errors="replace")
    except OSError:
        return None
    _, found, rest = text.partition("resuming after step ")
    return int(rest.split()[0]) if found else None
