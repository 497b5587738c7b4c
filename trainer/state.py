"""Where a run stands: the few numbers that, with the tensors, make a resume exact."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data.errors import DataError

NAME = "trainer.json"


@dataclass(frozen=True)
class TrainState:
    """Plain data saved as trainer.json in each checkpoint.

    step: optimiser steps done. cursor: global index of the next pack. tokens_total: real tokens
    seen. engram: the fingerprint of the Engram tables, as a RowStore gives it. mesh: sizes of the
    mesh that wrote it, by their settings. The other fields decide the order of samples: with
    another seed, step size, data set or packing a run would go on with other samples in silence.
    """

    seed: int
    packs_per_step: int
    data_fingerprint: str
    plan_fingerprint: str
    step: int = 0
    cursor: int = 0
    tokens_total: int = 0
    engram: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)

    def after_step(self, *, tokens: int) -> TrainState:
        """The state once one more step of `tokens` real tokens is done."""
        return replace(
            self,
            step=self.step + 1,
            cursor=self.cursor + self.packs_per_step,
            tokens_total=self.tokens_total + tokens,
        )

    def write(self, folder: Path) -> Path:
        """Write trainer.json; returns it."""
        file = folder / NAME
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return file

    @classmethod
    def read(cls, folder: Path) -> TrainState:
        """Read trainer.json of a verified checkpoint."""
        fields: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return cls(**fields)

    def require_same_samples(
        self, fresh: TrainState, *, folder: Path, accept_changed: bool = False
    ) -> None:
        """Check that a run described by `fresh` goes on with the samples of this one.

        Raises DataError for other documents unless that is accepted, ValueError for another order
        of the same ones.
        """
        changed = self.data_fingerprint != fresh.data_fingerprint
        if changed and not accept_changed:
            raise DataError(
                f"The documents are not those that {folder} was trained on (fingerprint "
                f"{fresh.data_fingerprint[:12]} now, {self.data_fingerprint[:12]} then). Restore "
                "the files and the tokenizer, start a new run, or set data.accept_changed=true: "
                f"then the run goes on with pack {self.cursor:,} of what is there now, so some "
                "documents may come twice in this epoch and others not at all."
            )
        for key, name in (("seed", "seed"), ("packs_per_step", "train.packs_per_step")):
            now, then = getattr(fresh, key), getattr(self, key)
            if now != then:
                raise ValueError(
                    f"{name}={now}, but {folder} was written with {then}, which decides the order "
                    f"of samples; set {name}={then}, or start a new run."
                )
        if self.plan_fingerprint != fresh.plan_fingerprint and not changed:
            raise ValueError(
                f"The documents are packed otherwise than when {folder} was written; restore "
                "data.pack_length and data.holdout, or start a new run."
            )

    def require_same_mesh(self, fresh: TrainState, *, folder: Path) -> None:
        """ValueError that names both unless the mesh is the one that this was written on."""
        if self.mesh != fresh.mesh:
            raise ValueError(
                f"checkpoint.strict=true, and {folder} was written on another mesh.\n"
                f"  now:  {mesh_text(fresh.mesh)}\n  then: {mesh_text(self.mesh)}\n"
                "Use the mesh of then, or set checkpoint.strict=false: any mesh can go on with it."
            )

    def require_same_tables(self, now: dict[str, Any], *, folder: Path) -> None:
        """Check that the Engram tables, read or restored, are those of this state.

        Raises DataError that names both: other rows in the tables' files would change every
        output, and nothing else would show it.
        """
        then = self.engram
        if now["tables"] == then["tables"]:
            return
        if now["store"] == then["store"] == "memory":
            raise DataError(
                f"The Engram tables restored from {folder} are not those that were saved in it; "
                "restore the checkpoint's files, or remove it to go on from an older one."
            )
        raise DataError(
            f"The Engram tables are not those that {folder} was trained with.\n"
            f"  now:  {_tables(now)}\n  then: {_tables(then)}\n"
            "Set model.engram.path to the files of then, or start a new run."
        )


def mesh_text(mesh: dict[str, int]) -> str:
    """A mesh as one would set it on the command line."""
    return " ".join(f"parallel.{name}={size}" for name, size in mesh.items())


def _tables(fingerprint: dict[str, Any]) -> str:
    where = fingerprint.get("source", "the checkpoint's own")
    listed = (
        f"{t['name']} of {t['bytes']:,} bytes, sampled rows {t['sampled_rows'][:12]}"
        for t in fingerprint["tables"]
    )
    return f"{where}: {'; '.join(listed)}"
