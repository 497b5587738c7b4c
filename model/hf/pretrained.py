"""A model from a folder in the released layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.config import EngramStoreConfig
from model.engram.mapped import MappedStore
from model.hf.configuration import DeepseekV41Config
from model.released.audit import audit, unread_by
from model.released.errors import WeightsError
from model.released.files import open_folder
from model.released.load import load, targets_of, wanted_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from model.hf.modeling import DeepseekV41ForCausalLM

TOKENIZER = "tokenizer.json"


def load_pretrained(
    cls: type[DeepseekV41ForCausalLM],
    path: Path,
    *,
    config: DeepseekV41Config | None,
    dtype: torch.dtype | str | None,
) -> DeepseekV41ForCausalLM:
    """The model whose config.json, weights and tokenizer.json lie in a folder, or in the snapshot
    of a Hugging Face cache folder.

    dtype: torch.float32 or torch.bfloat16 instead of the configured one. Tables stay in their
    files. WeightsError (a ValueError) lists everything wrong with the weights.
    """
    folder = open_folder(path)
    if config is None:
        document = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
        config = DeepseekV41Config.from_dict(document)
    if dtype not in (None, "auto"):
        name = str(dtype).removeprefix("torch.")
        config.dtype = config.text_config["dtype"] = name
    architecture = config.architecture()
    tokenizer = _tokenizer(folder.path)
    with torch.device("meta"):
        model = cls(config)
    model.to_empty(device="cpu")
    if tokenizer is not None and architecture.engram_layers:
        model.use_tokenizer(tokenizer)
    targets = targets_of(model.model)
    unread = unread_by(architecture, tables=False)
    if found := audit(folder, wanted_shapes(targets), unread=unread):
        raise WeightsError(folder.path, found)
    load(folder, targets, progress=lambda done, total: None)
    if architecture.engram_layers:
        source = EngramStoreConfig(store="mapped", path=str(folder.path))
        model.store = MappedStore(replace(architecture, engram=source), token_map=model.token_map)
    return model.eval()


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    if not (folder / TOKENIZER).is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / TOKENIZER), clean_up_tokenization_spaces=False
    )
