"""Where documents come from and how they become packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from model.config import ModelConfig

Source = Literal["embedded", "jsonl", "text"]


@dataclass(frozen=True)
class DataConfig:
    """The documents of a run and the shape of its packs.

    source: embedded = the prose of Python's own help topics, no download; jsonl = one JSON object
    a line with the text in `text_field`; text = one document a .txt file. paths: files, glob
    patterns or folders. tokenizer: "deepseek" (the released one) or the path of a tokenizer.json.
    pack_length: tokens of one row. holdout: share of the documents kept from training for
    evaluation. workers: processes that prepare batches; 0 = this one.
    """

    source: Source
    pack_length: int
    paths: tuple[str, ...] = ()
    text_field: str = "text"
    tokenizer: str = "deepseek"
    holdout: float = 0.05
    workers: int = 0

    def problems(self) -> list[str]:
        """Broken rules among these fields alone, each with its fix; empty when sound."""
        found = []
        sources = get_args(Source)
        if self.source not in sources:
            found.append(f"data.source={self.source} is unknown; use one of {', '.join(sources)}")
        if self.source == "embedded" and self.paths:
            found.append(
                f"data.paths={list(self.paths)} is not read by data.source=embedded; "
                "use data.source=jsonl or text, or drop data.paths"
            )
        if self.source in ("jsonl", "text") and not self.paths:
            found.append(
                f"data.source={self.source} needs data.paths: files, glob patterns or folders"
            )
        if any(not path for path in self.paths):
            found.append(f"data.paths={list(self.paths)} holds an empty path; drop it")
        if not self.text_field:
            found.append("data.text_field is empty; name the field that holds the text")
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
