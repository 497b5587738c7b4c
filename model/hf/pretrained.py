"""A model from a folder in the released layout, and back into one."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from model.config import EngramStoreConfig
from model.empty import give_memory, without_memory
from model.engram.mapped import MappedStore
from model.hf.configuration import DeepseekV41Config
from model.released.audit import unread_by
from model.released.documents import config_text
from model.released.export import plan_export, write_export
from model.released.files import open_folder
from model.released.load import load_folder, targets_of
from model.released.tables import store_tables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from model.hf.modeling import DeepseekV41ForCausalLM

TOKENIZER = "tokenizer.json"
SHARD_BYTES = 5 * 10**9


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
    with without_memory():
        model = cls(config)
    give_memory(model, device=torch.device("cpu"))
    if tokenizer is not None and architecture.engram_layers:
        model.use_tokenizer(tokenizer)
    unread = unread_by(architecture, tables=False)
    load_folder(folder.path, targets_of(model.model), unread=unread)
    if architecture.engram_layers:
        source = EngramStoreConfig(store="mapped", path=str(folder.path))
        model.store = MappedStore(replace(architecture, engram=source), token_map=model.token_map)
    return model.eval()


def save_pretrained(model: DeepseekV41ForCausalLM, folder: Path) -> None:
    """Write config.json, the tokenizer and unquantised weights, tables included, in the model's
    dtype, so that `load_pretrained` gives an equal model. Files of these names are replaced."""
    config = model.architecture
    dtype: Literal["float32", "bfloat16"] = config.dtype
    tensors = _Held(model.model)
    tables = {}
    if model.store is not None:
        tables = store_tables(model.store, config)
    plan = plan_export(
        tensors.shapes, tables, format=dtype, source=None, draft=False, largest=SHARD_BYTES
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name:
        made = Path(name)
        write_export(plan, tensors, tables, to=made, progress=lambda done, total: None)
        text = config_text(config, source=None, dtype=dtype, quantised=False, draft=False)
        (made / "config.json").write_text(text, encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(made)
        for file in made.iterdir():
            os.replace(file, folder / file.name)


class _Held:
    """A model's tensors, as an export wants to see them."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {target.name: target.tensor for target in targets_of(model)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        return self._tensors[name]


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    if not (folder / TOKENIZER).is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / TOKENIZER), clean_up_tokenization_spaces=False
    )
