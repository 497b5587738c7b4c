"""The supervisor of a run in a Ray cluster, as a child of the run's actor (see `resident`).

Usage: python -P -m launcher.backends.ray.work RUN_DIR, with PYTHONPATH on the run's code.

How it ended is left in the run's ended.json, for commands that follow the run: see `how_it_ended`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launcher.backends.ray.backend import Ray
from launcher.guard import die_with_parent
from launcher.handover import take_over
from launcher.problems import Stop
from launcher.run_dir import RunFolder
from launcher.submission import Submission
from trainer.disk import put_text
from trainer.outcome import Outcome

NOT_STARTED = "not started"  # the reason of an end by Stop


def main() -> int:
    die_with_parent()
    folder = RunFolder(Path(sys.argv[1]))
    if (known := how_it_ended(folder)) is not None:  # the actor was lost with nothing left to do
        return known.code
    try:
        begun = folder.last_attempt()
        lost = begun >= Submission.of(folder).first_attempt
        if lost:
            _say(f"The supervisor of attempt {begun} was lost; this one takes over.")
        _, outcome, _ = take_over(folder, say=_say, backend=lambda _: Ray(say=_say, again=lost))
    except Stop as stop:
        outcome = Outcome(stop.code, NOT_STARTED, folder.saved_step(), stop.message)
        _say(stop.message)
    put_text(folder.ended_file, json.dumps(outcome.to_dict(), indent=1) + "\n")
    return outcome.code


def how_it_ended(folder: RunFolder) -> Outcome | None:
    """How the last submission of a run to a Ray cluster ended; None while it goes on, and if its
    supervisor ended without a word."""
    try:
        return Outcome.from_dict(json.loads(folder.ended_file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
