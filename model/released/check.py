"""Whether a folder of weights can start a model, told before anything is built or read."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

from model.config import ModelConfig
from model.empty import without_memory
from model.names import table_name
from model.released.audit import audit, unread_by
from model.released.errors import WeightsError
from model.released.files import WeightsFolder, open_folder
from model.released.layout import Shape
from model.released.load import targets_of, wanted_shapes
from model.transformer import DeepseekV41

CONFIG = "config.json"
# What may differ: how deep and how long we train, which parts take no part, how we run it. Any
# other entry changes what the same weights compute.
FREE = {
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "max_position_embeddings",
    "initializer_range",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "dtype",
    "vision",
    "qat",
    "engram",
    "compile",
    "weights",
    "workspace_mb",
    "carried",
}


def model_shapes(config: ModelConfig, *, tables: bool) -> dict[str, Shape]:
    """Decoded shape by released name of everything that a model is made of; nothing is allocated.

    tables: with its Engram tables.
    """
    with without_memory():
        shapes = wanted_shapes(targets_of(DeepseekV41(config)))
    if tables:
        rows = dict(zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True))
        shapes |= {table_name(n): (rows[n], config.engram_head_dim) for n in config.engram_layers}
    return shapes


def weights_problems(path: Path, config: ModelConfig, *, tables: bool) -> list[str]:
    """Why a model of this configuration cannot start from the weights in `path`; each by name.

    Reads headers and config.json alone. tables: whether the Engram tables are wanted too.
    """
    try:
        folder = open_folder(path)
        found = config_problems(folder, config)
    except WeightsError as error:
        return error.problems
    wanted = model_shapes(config, tables=tables)
    return found + audit(folder, wanted, unread=unread_by(config, tables=tables))


def config_problems(folder: WeightsFolder, config: ModelConfig) -> list[str]:
    """Entries of the folder's config.json that another model is configured with."""
    document = folder.json(CONFIG)
    if document is None:
        return []
    try:
        theirs = ModelConfig.from_released(document)
    except (ValueError, TypeError, AttributeError) as error:
        return [f"{CONFIG}: {error}"]
    found = []
    for f in fields(ModelConfig):
        if f.name in FREE:
            continue
        mine, other = (_effective(c, f.name, config.num_hidden_layers) for c in (config, theirs))
        if mine != other:
            found.append(f"{CONFIG} has {f.name}={_shown(other)}, this model {_shown(mine)}")
    if config.vision.num_hidden_layers:
        mine, other = asdict(config.vision), asdict(theirs.vision)
        found += [
            f"{CONFIG} has vision.{key}={other[key]}, this model {mine[key]}"
            for key in mine
            if mine[key] != other[key] and key not in ("max_image_tokens", "min_pixels")
        ]
    return found


def _effective(config: ModelConfig, name: str, layers: int) -> object:
    """The value of an entry as far as it concerns the first `layers` layers."""
    value = getattr(config, name)
    if name == "compress_ratios":
        return value[:layers]
    if name == "engram_num_embeddings":
        return value[: len([n for n in config.engram_layer_ids if n < layers])]
    return tuple(n for n in value if n < layers) if name.endswith("_layer_ids") else value


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
