"""Where a run stands: the few numbers that, with the tensors, make a resume exact."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "trainer.json"


@dataclass(frozen=True)
class TrainState:
    """Plain data saved as trainer.json in each checkpoint.

    step: optimiser steps done. cursor: global index of the next pack. tokens_total: real tokens
    seen. The rest identifies the sample order: another seed, step size or data set would continue
    with other samples in silence.
    """

    seed: int
    packs_per_step: int
    data_fingerprint: str
    step: int = 0
    cursor: int = 0
    tokens_total: int = 0

    def write(self, folder: Path) -> None:
        """Write trainer.json."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        (folder / NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> TrainState:
        """Read trainer.json of a verified checkpoint."""
        fields: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return cls(**fields)

    def require_same_samples(self, fresh: TrainState, *, folder: Path) -> None:
        """Raise ValueError unless a run described by `fresh` sees this one's samples in order."""
        if self.data_fingerprint != fresh.data_fingerprint:
            raise ValueError(
                f"The data are not those of {folder}: fingerprint {fresh.data_fingerprint} now, "
                f"{self.data_fingerprint} then. Restore the files, the tokenizer and the data "
                "settings, or start a new run."
            )
        for key, name in (("seed", "seed"), ("packs_per_step", "train.packs_per_step")):
            now, then = getattr(fresh, key), getattr(self, key)
            if now != then:
                raise ValueError(
                    f"{name}={now}, but {folder} was written with {then}, which decides the order "
                    f"of samples; set {name}={then}, or start a new run."
                )
