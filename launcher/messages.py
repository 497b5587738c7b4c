"""The last lines of a command: how it went, where things are, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.run_config import RunConfig
from launcher.run_dir import Attempt, RunFolder
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

# Ends after which the same command, resumed, would end in the same way.
FINAL = (ExitCode.CONFIG, ExitCode.BAD_DATA, ExitCode.DIVERGED)


def closing(
    outcome: Outcome,
    config: RunConfig,
    *,
    folder: RunFolder,
    attempt: Attempt,
    plot: Path | None,
    command: Sequence[str],
) -> str:
    """What a person reads last. `command`: the words that started this run."""
    lines = [outcome.message, ""] if outcome.message else [""]
    lines.append(f"Run     {folder.path}")
    if plot is not None:
        lines.append(f"Plot    {plot}")
    if outcome.code == ExitCode.DONE:
        lines.append(f"Next    {next_command(config, command)}")
        return "\n".join(lines)
    lines.append(f"Log     {attempt.log(0)}")
    if outcome.code not in FINAL:
        lines.append(f"Resume  {resume_command(config, command)}")
    return "\n".join(lines)


def next_command(config: RunConfig, command: Sequence[str]) -> str:
    """Their own text after the built-in one; else the same for twice as long."""
    if _resumes(command):
        return shlex.join([*command, f"train.steps={2 * config.train.steps}"])
    kept = [w for w in command if not _sets(w, "id", "resume")]
    if config.data.source == "embedded":
        kept = [w for w in kept if not _sets(w, "data", "data.paths", "data.source", "name")]
        words = [*kept, "data=text", "data.paths=[YOUR.txt]", "name=mine"]
    else:
        kept = [w for w in kept if not _sets(w, "train.steps")]
        words = [*kept, f"train.steps={2 * config.train.steps}"]
    return shlex.join(words)


def resume_command(config: RunConfig, command: Sequence[str]) -> str:
    """The command that continues this very run."""
    if _resumes(command):
        return shlex.join(command)
    kept = [w for w in command if not _sets(w, "id", "resume")]
    return shlex.join([*kept, f"id={config.id}", "resume=auto"])


def labels(points: Sequence[Sequence[str]]) -> list[str]:
    """What tells each point of a sweep from the others: its overrides that not all points have."""
    common = set.intersection(*(set(overrides) for overrides in points))
    return [" ".join(o for o in overrides if o not in common) for overrides in points]


def _resumes(command: Sequence[str]) -> bool:
    """Whether it is `dsv41 resume RUN`, which means the same each time."""
    return list(command[:2]) == ["dsv41", "resume"]


def _sets(word: str, *names: str) -> bool:
    return word.partition("=")[0].lstrip("+") in names
