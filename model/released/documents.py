"""The files beside the weights: config.json, and what belongs to the tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from model.config import ModelConfig
from model.released.check import CONFIG

TOKENIZER = "tokenizer.json"
# Beside tokenizer.json, what tells software how to use it.
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "activation_scheme": "dynamic",
}


def config_text(
    config: ModelConfig,
    *,
    source: Path | None,
    dtype: Literal["float32", "bfloat16"],
    quantised: bool,
    draft: bool,
) -> str:
    """config.json of an exported model.

    Entries that do not shape the backbone are those of the source's file. It is the source's own
    text where it would say the same. Without a draft there are no draft layers.
    """
    text, theirs = None, None
    if source is not None and (source / CONFIG).is_file():
        text = (source / CONFIG).read_text(encoding="utf-8")
        theirs = ModelConfig.from_released(json.loads(text))
    carried = dict(theirs.carried if theirs is not None else config.carried)
    if not quantised:
        carried.pop("quantization_config", None)
    elif "quantization_config" not in carried:
        carried["quantization_config"] = json.dumps(QUANTISATION)
    layers = theirs.num_nextn_predict_layers if theirs is not None else 0
    made = replace(
        config,
        carried=tuple(carried.items()),
        dtype=dtype,
        num_nextn_predict_layers=layers if draft else 0,
    ).to_released()
    if text is not None and theirs is not None and theirs.to_released() == made:
        return text
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def tokenizer_files(
    source: Path | None, *, tokenizer: Path, tokens: dict[str, str], max_length: int
) -> dict[str, bytes]:
    """File name -> content: the source's tokenizer, or else that of the run.

    tokens: the run's special tokens by name (bos_token, eos_token, pad_token).
    """
    if source is not None and (source / TOKENIZER).is_file():
        names = [n for n in (TOKENIZER, *COMPANIONS) if (source / n).is_file()]
        return {name: (source / name).read_bytes() for name in names}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **tokens,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return {TOKENIZER: tokenizer.read_bytes(), "tokenizer_config.json": text.encode()}
