"""From a source's configuration to the kind of document it holds."""

from __future__ import annotations

from data.kinds.base import Kind
from data.kinds.chat import Chat, chat_problems
from data.kinds.pretrain import Pretrain
from data.sources.config import SourceConfig
from data.tokenizer import Encoder


def open_kind(config: SourceConfig, encoder: Encoder) -> Kind:
    """The kind of `config`, ready to encode records."""
    fields = config.fields
    if config.kind == "pretrain":
        return Pretrain(encoder, fields.text)
    assert config.kind == "chat", "validated with the configuration"
    return Chat(
        encoder, fields.messages, fields.role, fields.content, all_labels=config.labels == "all"
    )


def kind_problems(config: SourceConfig, encoder: Encoder, *, name: str) -> list[str]:
    """Why this kind cannot be made with this tokenizer; empty when it can.

    name: what the source's settings are called.
    """
    found = chat_problems(encoder) if config.kind == "chat" else []
    return [f"{name}.kind={config.kind}: {problem}" for problem in found]
