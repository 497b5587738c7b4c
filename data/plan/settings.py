"""What the packs of a run depend on, besides the documents."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

PLAN_FORMAT = 2  # one more whenever the same documents and settings would be packed otherwise

OnLong = Literal["split", "drop", "refuse"]


@dataclass(frozen=True)
class PlanSettings:
    """Shape of the packs and what goes into them.

    alignment: of documents in a row, a divisor of pack_length. on_long_document: what happens to a
    document that is longer than a pack. holdout: share of the documents kept from training; which
    ones they are follows from seed. streaming: windows may still be arriving when training begins,
    so the first alone holds out documents, and every evaluation of a run sees the same ones.
    """

    pack_length: int
    alignment: int
    on_long_document: OnLong
    holdout: float
    seed: int
    streaming: bool = False

    def held_out_share(self, window: int) -> float:
        """Share of a window's documents that are kept from training."""
        return 0.0 if self.streaming and window > 0 else self.holdout

    def key(self, *documents: str) -> str:
        """SHA-256 that identifies the plan of these documents, each a fingerprint."""
        settings = asdict(self)
        if not self.holdout:
            del settings["seed"]  # it decides nothing, so runs of any seed share their plans
        whole = json.dumps([PLAN_FORMAT, settings, documents], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()
