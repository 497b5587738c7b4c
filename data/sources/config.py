"""One source of documents: where its records are, and what is read from each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

SourceName = Literal["embedded", "hf", "jsonl", "parquet", "pictures", "text"]
KindName = Literal["chat", "image_chat", "pretrain"]

FILES = ("jsonl", "parquet", "text")  # sources that `paths` gives files, patterns or folders
FIELDS_READ: dict[str, tuple[str, ...]] = {
    "pretrain": ("text",),
    "chat": ("messages", "role", "content"),
    "image_chat": ("messages", "role", "content", "images"),
}


@dataclass(frozen=True)
class FieldsConfig:
    """Names of the fields of a record.

    text: a document of kind pretrain. messages: the conversation of kind chat, a list of objects
    whose fields are role and content. images: those of kind image_chat, a list.
    """

    text: str = "text"
    messages: str = "messages"
    role: str = "role"
    content: str = "content"
    images: str = "images"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The documents of one source.

    source: embedded = the prose of Python's own help topics; pictures = drawn shapes and a
    photograph with captions; jsonl = one JSON object a line, plain, gzip or zstd; parquet; text =
    one document a file; hf = a Hugging Face dataset, by name or as the folder that save_to_disk
    wrote, with `subset`, `split` and `revision`. paths: files, glob patterns or folders; for hf the
    one dataset. kind: pretrain = texts; chat = conversations in the released chat form; image_chat
    = the same with images, whose relative paths start from `image_folder`. labels: assistant =
    only what the assistant says is learnt; all. max_document_length: tokens, None = no limit but
    that of a pack. on_long_document says what happens to a longer document: split, never within
    an image (and at max_document_length only with kind pretrain), drop (counted), or refuse.
    streaming: train from the first window while later ones are still read.
    """

    source: str
    kind: KindName = "pretrain"
    paths: tuple[str, ...] = ()
    subset: str = ""
    split: str = "train"
    revision: str = ""
    fields: FieldsConfig = field(default_factory=FieldsConfig)
    image_folder: str = ""
    labels: Literal["assistant", "all"] = "assistant"
    max_document_length: int | None = None
    on_long_document: Literal["split", "drop", "refuse"] = "split"
    streaming: bool = False

    def source_problems(self, name: str) -> list[str]:
        """Broken rules of a source whose settings are called `name`.*, each with its fix."""
        found = self._path_problems(name)
        for given in ("subset", "revision"):
            if self.source != "hf" and getattr(self, given):
                found.append(
                    f"{name}.{given}={getattr(self, given)} is read by {name}.source=hf only; "
                    "leave it out"
                )
        if self.source == "hf" and not self.split:
            found.append(f"{name}.split is empty; name the dataset's split, for example train")
        found += self._kind_problems(name)
        found += [
            f"{name}.fields.{of} is empty; name the field that holds it"
            for of in FIELDS_READ.get(self.kind, ())
            if not getattr(self.fields, of)
        ]
        if self.max_document_length is not None and self.max_document_length < 2:
            found.append(
                f"{name}.max_document_length={self.max_document_length} leaves nothing to predict; "
                "use 2 or more, or null"
            )
        return found

    def _kind_problems(self, name: str) -> list[str]:
        if self.kind not in get_args(KindName):
            known = ", ".join(get_args(KindName))
            return [f"{name}.kind={self.kind} is unknown; use one of {known}"]
        found = []
        if self.kind != "pretrain" and self.source in ("embedded", "text"):
            found.append(
                f"{name}.kind={self.kind} needs records with fields; {name}.source={self.source} "
                "has texts: use jsonl, parquet or hf"
            )
        if self.kind != "image_chat" and self.source == "pictures":
            found.append(f"{name}.source=pictures has images; set {name}.kind=image_chat")
        if self.kind != "image_chat" and self.image_folder:
            found.append(
                f"{name}.image_folder={self.image_folder} is read by {name}.kind=image_chat only; "
                "leave it out"
            )
        if (
            self.kind != "pretrain"
            and self.max_document_length
            and self.on_long_document == "split"
        ):
            found.append(
                f"{name}.on_long_document=split would cut conversations in the middle of a turn; "
                f"use drop or refuse with kind={self.kind}"
            )
        return found

    def _path_problems(self, name: str) -> list[str]:
        source, paths = self.source, list(self.paths)
        if source not in get_args(SourceName):
            known = ", ".join(get_args(SourceName))
            return [f"{name}.source={source} is unknown; use one of {known}"]
        if source in ("embedded", "pictures") and paths:
            return [
                f"{name}.paths={paths} is not read by {name}.source={source}; "
                f"use {name}.source=jsonl or text, or drop {name}.paths"
            ]
        if source in FILES and not paths:
            return [f"{name}.source={source} needs {name}.paths: files, glob patterns or folders"]
        if source == "hf" and len(paths) != 1:
            return [
                f"{name}.source=hf needs one dataset in {name}.paths, by name or folder, not "
                f"{len(paths)}; mix several with data=mixture"
            ]
        return [f"{name}.paths={paths} holds an empty path; drop it"] if not all(paths) else []
