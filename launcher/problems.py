"""How a command ends early: with a message of one screen for a person, and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from trainer.exit_codes import ExitCode


class Stop(Exception):
    """Ends the command. `message` names the thing and the fix; nothing was left half-done."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConfigProblems(Stop):
    """Everything that is wrong with a configuration, one line each, all found at once. hint: what
    may help against all of it."""

    def __init__(
        self, problems: Sequence[str], *, code: ExitCode = ExitCode.CONFIG, hint: str = ""
    ) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        what = "command" if code == ExitCode.USAGE else "configuration"
        lines = "\n".join(f"  {one_line(problem)}" for problem in self.problems)
        text = f"{count} with this {what}; nothing was started.\n\n{lines}"
        super().__init__(code, f"{text}\n\n{hint}" if hint else text)


def one_line(text: str) -> str:
    """`text` with its line breaks and runs of spaces as single spaces."""
    return " ".join(text.split())


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted name that somebody who wrote `name` probably meant; None if none is near.

    Looked for among names of the same section, then by the same last part elsewhere, then by
    likeness of the whole.
    """
    known = list(known)
    section, _, leaf = name.rpartition(".")
    prefix = f"{section}." if section else ""
    siblings = [k[len(prefix) :] for k in known if k.rpartition(".")[0] == section]
    if near := difflib.get_close_matches(leaf, siblings, n=1):
        return prefix + near[0]
    by_leaf: dict[str, str] = {}
    for k in known:
        by_leaf.setdefault(k.rpartition(".")[2], k)
    if leaf in by_leaf:
        return by_leaf[leaf]
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return near[0]
    if near := difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7):
        return by_leaf[near[0]]
    return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean X?`, or an empty string when nothing is near."""
    found = nearest(name, known)
    return f"did you mean {found}?" if found else ""
