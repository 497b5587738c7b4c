"""How attempts ended, kept for a supervisor that takes over from another."""

from __future__ import annotations

from launcher.decide import AttemptEnd
from launcher.run_dir import RunFolder
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

_KEPT = ("saved_before", "saved", "asked", "preempted", "leaving")


def remembered(end: AttemptEnd) -> dict[str, object]:
    """What the last event of an attempt says beside its outcome."""
    return {name: getattr(end, name) for name in _KEPT}


def attempts_since(folder: RunFolder, first: int) -> list[AttemptEnd]:
    """How the attempts from number `first` on ended, as their supervisors wrote it. One without a
    word was ended together with its supervisor, so by the cluster."""
    found = []
    for number in range(first, folder.last_attempt() + 1):
        end = AttemptEnd(Outcome(ExitCode.AGAIN, "lost", 0), preempted=True, leaving=True)
        for known in folder.attempt(number).events():
            if known["event"] == "end":
                outcome = Outcome(ExitCode(known["code"]), known["reason"], known["step"])
                end = AttemptEnd(outcome, **{name: known[name] for name in _KEPT})
        found.append(end)
    return found
