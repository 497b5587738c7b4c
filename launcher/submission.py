"""A run handed to a supervisor elsewhere, which begins later: in a job, or in a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.cache.prepare import PreparedSource
from launcher.problems import Stop
from launcher.run_dir import RunFolder
from trainer.disk import put_text
from trainer.exit_codes import ExitCode


@dataclass(frozen=True)
class Submission:
    """What the supervisor must know beside the run's configuration, in the run's submission.json.

    first_attempt: the number from which on attempts count against this submission's budgets.
    """

    sources: Sequence[PreparedSource]
    given: Mapping[str, Any]
    first_attempt: int

    @classmethod
    def of(cls, folder: RunFolder) -> Submission:
        """Stop 78 for a run that was never submitted."""
        try:
            known = json.loads(folder.submission_file.read_text("utf-8"))
        except OSError as error:
            raise Stop(
                ExitCode.CONFIG,
                f"{folder.submission_file}: {error.strerror}. Submit the run with dsv41-train "
                f"(launcher=slurm, or launcher=ray with an address), or dsv41 resume {folder.path}",
            ) from error
        sources = [PreparedSource.from_dict(source) for source in known["sources"]]
        return cls(sources, known["given"], known["first_attempt"])

    def write(self, folder: RunFolder) -> None:
        known = {
            "sources": [source.to_dict() for source in self.sources],
            "given": dict(self.given),
            "first_attempt": self.first_attempt,
        }
        put_text(folder.submission_file, json.dumps(known, indent=1) + "\n")


def given_to_next(folder: RunFolder) -> Mapping[str, Any] | None:
    """What the next attempt of a submitted run was given; None when no attempt is to come of it, or
    one has."""
    try:
        submission = Submission.of(folder)
    except Stop:
        return None
    return submission.given if submission.first_attempt > folder.last_attempt() else None
