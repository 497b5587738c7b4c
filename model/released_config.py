"""The released nested config.json: root, text_config and vision_config, read and written."""

from __future__ import annotations

import difflib
import json
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig, RopeScaling, VisionConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

OURS = {
    "vision",
    "qat",
    "engram",
    "compile",
    "weights",
    "workspace_mb",
    "carried",
    "image_token_id",
}
TEXT = {f.name for f in fields(ModelConfig)} - OURS
TUPLES = {
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "engram_num_embeddings",
}
# Entries that other software writes and that have one meaning here.
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v41", "deepseek_v41_text", "deepseek_v41_vision"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "tie_word_embeddings": (False,),
}
METADATA = {
    "architectures",
    "auto_map",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
ROOT = {"dtype", "image_token_id", "text_config", "vision_config"}
VISION = {f.name for f in fields(VisionConfig)}


def read_released(document: dict) -> dict[str, Any]:
    """Keyword arguments of `ModelConfig` from a parsed config.json; ValueError lists all faults."""
    faults: list[str] = []
    carried: list[tuple[str, str]] = []
    text = document.get("text_config")
    if not isinstance(text, dict):
        raise ValueError("config.json holds no text_config object: is it a DeepSeek-V4.1 config?")
    vision = document.get("vision_config", {"num_hidden_layers": 0})

    def sort_out(section: dict, known: set[str], prefix: str) -> dict[str, Any]:
        kept = {}
        for key, value in section.items():
            if key in FIXED and value not in FIXED[key]:
                faults.append(f"{prefix}{key}={value!r}: this model needs {FIXED[key][0]!r}")
            elif key in known:
                kept[key] = value
            elif key in FIXED or key in METADATA or key.startswith("dspark_"):
                carried.append((prefix + key, json.dumps(value, ensure_ascii=False)))
            else:
                faults.append(f"{prefix}{key} is not an entry of this format{_nearest(key, known)}")
        return kept

    root = sort_out(document, ROOT, "")
    kept = sort_out(text, TEXT, "text_config.")
    seen = sort_out(vision, VISION, "vision_config.")
    scaling = kept.pop("rope_scaling", None) or {}
    scaling = dict(scaling)
    known = {f.name for f in fields(RopeScaling)}
    for key in sorted(set(scaling) - known):
        faults.append(
            f"text_config.rope_scaling.{key} is not an entry of this format{_nearest(key, known)}"
        )
        scaling.pop(key)
    if "dtype" in root and root["dtype"] != kept.setdefault("dtype", root["dtype"]):
        faults.append(f"dtype={root['dtype']} but text_config.dtype={kept['dtype']}")
    needed = [f.name for f in fields(ModelConfig) if f.name in TEXT and not _has_default(f)]
    faults += [f"text_config.{n} is missing" for n in needed if n not in kept]
    if faults:
        raise ValueError("config.json cannot be used:\n  " + "\n  ".join(faults))
    kept = {k: tuple(v) if k in TUPLES else v for k, v in kept.items()}
    if "image_token_id" in root:
        kept["image_token_id"] = root["image_token_id"]
    return {
        **kept,
        "rope_scaling": RopeScaling(**scaling),
        "vision": VisionConfig(**seen),
        "carried": tuple(carried),
    }


def write_released(config: ModelConfig) -> dict[str, Any]:
    """The nested document; entries of `carried` return to where they stood."""
    values = asdict(config)
    text = {k: list(v) if k in TUPLES else v for k, v in values.items() if k in TEXT}
    vision: dict[str, Any] = {"num_hidden_layers": 0}
    if config.vision.num_hidden_layers:
        vision = values["vision"]
    document = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": config.dtype,
        "image_token_id": config.image_token_id,
        "text_config": text,
        "vision_config": vision,
    }
    for path, value in config.carried:
        *section, key = path.split(".")
        (document[section[0]] if section else document)[key] = json.loads(value)
    return document


def _nearest(key: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(key, sorted(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _has_default(f: Any) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING
