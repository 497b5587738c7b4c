"""Everything that decides a prepared set, and the names that follow from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.cache.pipeline import Pipeline
from data.cache.prepared import FORMAT
from data.kinds.opening import open_kind
from data.sources.opening import open_source
from data.tokenizer import Encoder

if TYPE_CHECKING:
    from data.sources.config import SourceConfig
    from model.config import ModelConfig


@dataclass(frozen=True)
class Recipe:
    """A source, looked at, and what is made of it.

    name: what its settings are called. streaming: training may begin with its first window.
    """

    name: str
    source: str
    pipeline: Pipeline
    window_documents: int
    streaming: bool

    @property
    def fingerprint(self) -> str:
        """Identifies the documents, wherever the source lies."""
        return _sha256([FORMAT, self.settings(), self.pipeline.source.identity()])

    @property
    def folder_name(self) -> str:
        """The set's folder in the cache: another one as soon as a file was rewritten."""
        stamp = [FORMAT, self.window_documents, self.settings(), self.pipeline.source.stamp()]
        return f"{self.source}-{_sha256(stamp)[:24]}"

    def settings(self) -> dict[str, Any]:
        """What decides the documents besides the source, as plain data."""
        found = self.pipeline.kind.settings()
        if self.pipeline.max_length:
            found["max_document_length"] = self.pipeline.max_length
            found["on_long_document"] = self.pipeline.on_long
        return found

    def header(self) -> dict[str, Any]:
        """What set.json says of it."""
        return {
            "fingerprint": self.fingerprint,
            "settings": self.settings(),
            "window_documents": self.window_documents,
            "files": list(self.pipeline.source.files),
        }


def read_recipe(
    config: SourceConfig,
    model: ModelConfig,
    *,
    name: str,
    tokenizer: str,
    window_documents: int,
) -> Recipe:
    """Look at the source of `config`. DataError names every file that cannot be used."""
    kind = open_kind(config, Encoder.for_model(model, tokenizer=tokenizer), model.vision)
    source = open_source(config, name=name, columns=kind.columns, optional=kind.optional)
    pipeline = Pipeline(source, kind, config.max_document_length, config.on_long_document)
    return Recipe(name, config.source, pipeline, window_documents, config.streaming)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
