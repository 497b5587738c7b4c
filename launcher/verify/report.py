"""What came out of a case: one line for a person, one object for a program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.verify.gates import Check

Status = Literal["pass", "FAIL", "skipped", "error"]
FAILURES_SHOWN = 3


@dataclass(frozen=True)
class Report:
    """One case's result. `reason` says why it was skipped or could not be read."""

    name: str
    kind: str
    status: Status
    reason: str = ""
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, kind: str, checks: list[Check], *, seconds: float) -> Report:
        status = "pass" if checks and all(c.passed for c in checks) else "FAIL"
        reason = "" if checks else "nothing to compare"
        return cls(name, kind, status, reason, checks, seconds)

    @property
    def failed(self) -> list[Check]:
        return [c for c in self.checks if not c.passed]

    def line(self, *, width: int) -> str:
        """`name  status  figures` with the worst figure of every group, then what failed."""
        text = self.reason or ", ".join(_figure(group) for group in self._groups())
        if failed := self.failed:
            shown = "; ".join(_failure(c) for c in failed[:FAILURES_SHOWN])
            more = len(failed) - FAILURES_SHOWN
            text += f" | failed: {shown}" + (f"; and {more} more" if more > 0 else "")
        return f"{self.name:<{width}}  {self.status:<7}  {text}"

    def to_dict(self) -> dict[str, Any]:
        """Plain types for json.dumps; an error that is not finite becomes null."""
        return {
            "case": self.name,
            "kind": self.kind,
            "status": self.status.lower(),
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "worst": {group[0].group: _plain(worst(group)) for group in self._groups()},
            "failed": [_plain(c) for c in self.failed],
            "checks": [_plain(c) for c in self.checks],
        }

    def _groups(self) -> list[list[Check]]:
        groups: dict[str, list[Check]] = {}
        for check in self.checks:
            groups.setdefault(check.group, []).append(check)
        return list(groups.values())


def worst(group: list[Check]) -> Check:
    """The check with the largest error; one that is not finite counts as larger than any."""
    return max(group, key=lambda c: c.error if math.isfinite(c.error) else math.inf)


def _figure(group: list[Check]) -> str:
    name = group[0].group
    if all(c.total is not None for c in group):
        total = sum(c.total or 0 for c in group)
        return f"{name} {total - sum(int(c.error) for c in group)}/{total}"
    found = worst(group)
    return f"{name} {found.error:.1e}" + (f" ({found.subject})" if len(group) > 1 else "")


def _failure(check: Check) -> str:
    size = f"{check.error:.1e}"
    if check.total is not None:
        size = f"{int(check.error)} of {check.total} differ"
    return f"{check.group} {check.subject}: {size}, {check.gate}"


def _plain(check: Check) -> dict[str, Any]:
    return {
        "group": check.group,
        "subject": check.subject,
        "error": check.error if math.isfinite(check.error) else None,
        "total": check.total,
        "gate": check.gate,
        "passed": check.passed,
    }
