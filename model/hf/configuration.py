"""The released nested config.json as a transformers configuration."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from model.config import ModelConfig
from model.released_config import write_released


class DeepseekV41Config(PretrainedConfig):
    """root, `text_config` and `vision_config` as plain dictionaries, as in the released file.

    `architecture()` is the checked ModelConfig; ValueError names every bad entry. What transformers
    adds to a file of its own accord is kept aside and written back.
    """

    model_type = "deepseek_v41"
    _TEXT = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    _TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

    def __init__(
        self,
        text_config: dict[str, Any] | None = None,
        vision_config: dict[str, Any] | None = None,
        image_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.text_config = dict(text_config or {})
        self.vision_config = dict(vision_config or {"num_hidden_layers": 0})
        if image_token_id is not None:
            self.image_token_id = image_token_id
        for name in self._TOKENS:
            kwargs.setdefault(name, self.text_config.get(name))
        kwargs.setdefault("tie_word_embeddings", False)
        kwargs.setdefault("use_cache", False)
        super().__init__(**kwargs)
        # What generation and users of such models ask the root for.
        for name in self._TEXT:
            if name in self.text_config:
                setattr(self, name, self.text_config[name])

    @classmethod
    def from_architecture(cls, config: ModelConfig) -> DeepseekV41Config:
        """The configuration of a model of ours."""
        document = write_released(config)
        return cls(**{k: v for k, v in document.items() if k != "model_type"})

    def architecture(self) -> ModelConfig:
        """What the model is built from. ValueError lists every entry that cannot be used."""
        document: dict[str, Any] = {
            "text_config": self.text_config,
            "vision_config": self.vision_config,
        }
        if "image_token_id" in self.__dict__:
            document["image_token_id"] = self.image_token_id
        return ModelConfig.from_released(document)

    def get_text_config(self, *args: Any, **kwargs: Any) -> DeepseekV41Config:
        """This one: sections are plain dictionaries, and the root answers for the text."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The nested document: no copies of text entries at the root."""
        document = super().to_dict()
        for name in (*self._TEXT, *self._TOKENS):
            document.pop(name, None)
        return document


AutoConfig.register(DeepseekV41Config.model_type, DeepseekV41Config)
