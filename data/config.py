"""Where documents come from and how they become packs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from data.sources.config import FieldsConfig, SourceConfig

if TYPE_CHECKING:
    from model.config import ModelConfig

__all__ = ["DataConfig", "FieldsConfig", "MixtureSource", "SourceConfig"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,40}")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


@dataclass(frozen=True, kw_only=True)
class MixtureSource(SourceConfig):
    """A source of a mixture.

    weight: its share of the packs is weight / the sum of all weights. Each source is gone through
    in its own order, and anew whenever it is used up. epochs: the most times that may happen;
    None = as often as the weights ask for.
    """

    weight: float
    epochs: int | None = None

    def source_problems(self, name: str) -> list[str]:
        found = super().source_problems(name)
        if not 0 < self.weight < float("inf"):
            found.append(
                f"{name}.weight={self.weight} must be above 0; drop a source that is not used"
            )
        if self.epochs is not None and self.epochs < 1:
            found.append(f"{name}.epochs={self.epochs} must be 1 or more, or null for no limit")
        return found


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """The documents of a run and the shape of its packs.

    The settings of SourceConfig describe its one source; source=mixture takes those in `mixture`
    instead, by names of your own. tokenizer: "deepseek" (the released one) or the path of a
    tokenizer.json. pack_length: tokens of one row. holdout: share of the documents kept from
    training for evaluation. workers: processes that prepare batches; 0 = this one. cache_dir: where
    tokenised documents are kept; None = dsv41-train/data in the user's cache folder. processes:
    how many tokenise; None = one a core. window_documents: documents that are packed together.
    accept_changed: continue a run although its documents are not those it was trained on.
    """

    pack_length: int
    mixture: Mapping[str, MixtureSource] = field(default_factory=dict)
    tokenizer: str = "deepseek"
    holdout: float = 0.05
    workers: int = 0
    cache_dir: str | None = None
    processes: int | None = None
    window_documents: int = 2**20
    accept_changed: bool = False

    @property
    def cache_folder(self) -> Path:
        """The folder of all prepared sets."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "dsv41-train" / "data"

    def named_sources(self) -> Iterator[tuple[str, SourceConfig]]:
        """(what its settings are called, source) of each source of the run."""
        if self.source != "mixture":
            yield "data", self
        for name, source in self.mixture.items():
            yield f"data.mixture.{name}", source

    def problems(self) -> list[str]:
        """Broken rules among these fields alone, each with its fix; empty when sound."""
        found = self._mixture_problems()
        for name, source in self.named_sources():
            found += source.source_problems(name)
        if not self.tokenizer:
            found.append("data.tokenizer is empty; use deepseek or the path of a tokenizer.json")
        if self.pack_length < 2:
            found.append(
                f"data.pack_length={self.pack_length} leaves nothing to predict; use 2 or more"
            )
        if not 0 <= self.holdout < 1:
            found.append(f"data.holdout={self.holdout} must be a share of 0 or more and below 1")
        if self.workers < 0:
            found.append(f"data.workers={self.workers} must be 0 (none) or more")
        if self.cache_dir == "":
            found.append("data.cache_dir is empty; name a folder, or null for the user's cache")
        if self.processes is not None and self.processes < 1:
            found.append(
                f"data.processes={self.processes} must be 1 or more, or null for all cores"
            )
        if self.window_documents < 1:
            found.append(f"data.window_documents={self.window_documents} must be 1 or more")
        return found

    def _mixture_problems(self) -> list[str]:
        if self.source != "mixture":
            if not self.mixture:
                return []
            names = ", ".join(self.mixture)
            return [
                f"data.mixture ({names}) is not read by data.source={self.source}; "
                "use data=mixture, or drop data.mixture"
            ]
        found = []
        if not self.mixture:
            found.append(
                "data.source=mixture needs data.mixture: a weight and the settings of a source "
                "under each name of your choice"
            )
        for f in fields(SourceConfig):
            default = f.default_factory() if callable(f.default_factory) else f.default
            value = getattr(self, f.name)
            if f.name != "source" and value != default:
                found.append(
                    f"data.{f.name}={value} is not read by data.source=mixture; set it in the "
                    f"sources, for example data.mixture.NAME.{f.name}"
                )
        found += [
            f"data.mixture.{name}: a source's name is up to 41 letters, digits, '_' and '-', a "
            "letter first, and none of YAML's own words; rename it"
            for name in self.mixture
            if not _NAME.fullmatch(name) or name.lower() in _YAML_WORDS
        ]
        return found

    def model_problems(self, model: ModelConfig) -> list[str]:
        """Rules between the packs and the model: whole compression groups in every row."""
        length, alignment = self.pack_length, model.alignment
        if length < 2 or length % alignment == 0:
            return []
        why = f"the model's alignment {alignment} (the lcm of its compression ratios)"
        if length < alignment:
            return [f"data.pack_length={length} is below {why}; use {alignment} or a multiple"]
        below = length // alignment * alignment
        return [
            f"data.pack_length={length} is not a multiple of {why}; "
            f"use {below} or {below + alignment}"
        ]
