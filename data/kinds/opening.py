"""From a source's configuration to the kind of document it holds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from data.kinds.base import Kind
from data.kinds.chat import Chat, chat_problems
from data.kinds.image_chat import ImageChat
from data.kinds.pretrain import Pretrain
from data.sources.config import SourceConfig
from data.tokenizer import Encoder

if TYPE_CHECKING:
    from model.config import VisionConfig


def open_kind(config: SourceConfig, encoder: Encoder, vision: VisionConfig) -> Kind:
    """The kind of `config`, ready to encode records for a model that sees as `vision` says."""
    fields = config.fields
    if config.kind == "pretrain":
        return Pretrain(encoder, fields.text)
    chat = Chat(
        encoder, fields.messages, fields.role, fields.content, all_labels=config.labels == "all"
    )
    if config.kind == "chat":
        return chat
    assert config.kind == "image_chat", "validated with the configuration"
    folder = config.image_folder
    if folder:
        folder = os.path.abspath(os.path.expanduser(folder))
    return ImageChat(chat, fields.images, folder, vision)


def kind_problems(
    config: SourceConfig, encoder: Encoder, vision: VisionConfig, *, name: str
) -> list[str]:
    """Why this kind cannot be made with this tokenizer for this model; empty when it can.

    name: what the source's settings are called.
    """
    found = []
    if config.kind in ("chat", "image_chat"):
        found += chat_problems(encoder)
    if config.kind == "image_chat" and not vision.num_hidden_layers:
        found.append(
            "the model sees no images (model.vision.num_hidden_layers=0); use a model with a "
            "vision tower, such as model=tiny_image, or another kind"
        )
    return [f"{name}.kind={config.kind}: {problem}" for problem in found]
