"""How a training attempt ended, as plain data."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.exit_codes import ExitCode

LOST_PEER = "lost a peer"  # the reason of a rank that another one left alone


@dataclass(frozen=True)
class Outcome:
    """How one rank's attempt ended; what it writes for its supervisor.

    code: the process's exit code. reason: one word or two for tables ("done", "disk full").
    step: optimiser steps finished and kept in memory when it ended. message: one screen at most
    for a person, naming the thing and the fix; may be empty when all is well. ended: seconds since
    the epoch, so that the first of many ranks can be found.
    """

    code: ExitCode
    reason: str
    step: int
    message: str = ""
    ended: float = field(default_factory=time.time, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, ready for json.dumps."""
        return {**asdict(self), "code": int(self.code)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Outcome:
        """The inverse of to_dict."""
        return cls(**{**fields, "code": ExitCode(fields["code"])})
