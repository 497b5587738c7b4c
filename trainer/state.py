"""Where a run stands: the few numbers that, with the tensors, make a resume exact."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data.errors import DataError

NAME = "trainer.json"


@dataclass(frozen=True)
class TrainState:
    """Plain data saved as trainer.json in each checkpoint.

    step: optimiser steps done. cursor: global index of the next pack. tokens_total: real tokens
    seen. The other fields decide the order of samples: with another seed, step size, data set or
    packing a run would go on with other samples in silence.
    """

    seed: int
    packs_per_step: int
    data_fingerprint: str
    plan_fingerprint: str
    step: int = 0
    cursor: int = 0
    tokens_total: int = 0

    def after_step(self, *, tokens: int) -> TrainState:
        """The state once one more step of `tokens` real tokens is done."""
        return replace(
            self,
            step=self.step + 1,
            cursor=self.cursor + self.packs_per_step,
            tokens_total=self.tokens_total + tokens,
        )

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
        """Check that a run described by `fresh` goes on with the samples of this one.

        Raises DataError for other documents, ValueError for another order of the same ones.
        """
        if self.data_fingerprint != fresh.data_fingerprint:
            raise DataError(
                f"The documents are not those that {folder} was trained on (fingerprint "
                f"{fresh.data_fingerprint[:12]} now, {self.data_fingerprint[:12]} then). Restore "
                "the files and the tokenizer, or start a new run."
            )
        for key, name in (("seed", "seed"), ("packs_per_step", "train.packs_per_step")):
            now, then = getattr(fresh, key), getattr(self, key)
            if now != then:
                raise ValueError(
                    f"{name}={now}, but {folder} was written with {then}, which decides the order "
                    f"of samples; set {name}={then}, or start a new run."
                )
        if self.plan_fingerprint != fresh.plan_fingerprint:
            raise ValueError(
                f"The documents are packed otherwise than when {folder} was written; restore "
                "data.pack_length and data.holdout, or start a new run."
            )
