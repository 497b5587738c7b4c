"""Bytes on every rank of a mesh, by closed forms from the shapes of the model's tensors.

Nothing is allocated and no process group is needed. What the optimisers keep is asked of the
optimisers themselves, built over shapes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.empty import without_memory
from model.engram.primaries import PrimaryTable
from model.transformer import DeepseekV41
from trainer.config import ParallelConfig, TrainerConfig
from trainer.optim import build_optimizer, named_parameters
from trainer.sharding import is_island
from trainer.table_optim import build_table_optimizer

_EXPERT = re.compile(r"\.ffn\.experts\.(w13|w2)$")
_FP32 = 4


@dataclass(frozen=True)
class Held:
    """One class of bytes: int64 [world], by rank.

    lower: what makes it smaller, to be read after "use"; "" = nothing does. estimate: not an exact
    figure. host: in the host's memory, not the device's. note: why there is none.
    """

    name: str
    bytes: np.ndarray
    lower: str
    estimate: bool = False
    host: bool = False
    note: str = ""


@dataclass(frozen=True)
class Holdings:
    """Everything that the ranks of a run hold, and what a checkpoint of it takes."""

    parameters: int  # elements, without Engram tables
    table_values: int  # elements of the Engram tables
    active: int  # parameters and table values that one token of text meets
    classes: tuple[Held, ...]
    checkpoint_bytes: int

    def device_bytes(self) -> np.ndarray:
        """All classes on the device together, int64 [world]."""
        return sum_of(held.bytes for held in self.classes if not held.host)


def holdings(config: TrainerConfig) -> Holdings:
    """What the ranks of this run will hold. Seconds, for a model and a mesh of any size."""
    with without_memory():
        model = DeepseekV41(config.model, distill=config.indexer.distills(config.model))
    mesh = config.parallel
    parameters = dict(model.named_parameters())
    shares = {n: _elements(n, tuple(p.shape), mesh) for n, p in parameters.items()}
    learning = [n for n, p in parameters.items() if p.requires_grad]
    states = _states(model, config)
    state = sum_of(
        (shares[name] if tensor.shape == parameters[name].shape else tensor.numel())
        * np.full(mesh.world, tensor.element_size())
        for name, tensor in states
    )
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    weights = _FP32 * sum_of(shares.values()) + buffers
    gradients = _FP32 * sum_of(shares[name] for name in learning)
    tables, saved = _tables(config)
    more = "a larger parallel.dp_shard or parallel.cp, whose ranks share one copy of the model"
    classes = [
        Held("parameters", weights, more),
        Held("gradients", gradients, more),
        Held("optimiser", state, more),
        *tables,
        Held("master copies", np.zeros_like(weights), "", note="none: all of these are fp32"),
        _gathered(parameters, config),
        Held(
            "layers' inputs",
            _inputs(config),
            "a larger parallel.cp, or a smaller train.packs_per_micro_batch or data.pack_length",
            estimate=True,
        ),
    ]
    if config.checkpoint.staging is not None:
        whole = sum_of([weights, state, *(t.bytes for t in tables if not t.estimate)])
        copy = np.minimum(whole, config.checkpoint.staging)
        less = "a smaller checkpoint.staging_mb"
        classes.append(Held("checkpoint copy", copy, less, estimate=True, host=True))
    total = sum(p.numel() for p in parameters.values())
    values = _table_values(config.model)
    return Holdings(
        parameters=total,
        table_values=values,
        active=_active(parameters, config.model),
        classes=tuple(held for held in classes if held.bytes.any() or held.note),
        checkpoint_bytes=_FP32 * total
        + buffers
        + sum(tensor.numel() * tensor.element_size() for _, tensor in states)
        + saved,
    )


def chunks(number: int, ranks: int) -> np.ndarray:
    """How many of `number` things each rank has when they are cut as torch.chunk does: int64
    [ranks], equal but for the last ones, which may have fewer or none."""
    each = -(-number // ranks)
    return np.clip(number - each * np.arange(ranks, dtype=np.int64), 0, each)


def sum_of(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Element by element."""
    return np.asarray(np.sum(list(arrays), axis=0, dtype=np.int64))


def _elements(name: str, shape: tuple[int, ...], mesh: ParallelConfig) -> np.ndarray:
    """Elements of a parameter on each rank, int64 [world]; see `trainer.sharding`."""
    size, shards = int(np.prod(shape)), mesh.dp_shard * mesh.cp
    if mesh.world == 1 or is_island(name):
        return np.full(mesh.world, size, dtype=np.int64)
    if _EXPERT.search(name):  # even, by the rules of the mesh
        return np.full(mesh.world, size // shards, dtype=np.int64)
    own = chunks(shape[0], shards) * (size // shape[0])
    return np.tile(own, mesh.dp_replicate)


def _states(model: nn.Module, config: TrainerConfig) -> list[tuple[str, Tensor]]:
    """(parameter's name, tensor without memory) of all that its optimiser keeps."""
    optimizer = build_optimizer(model, config.optim, config.model)
    return [
        (name, tensor)
        for name, parameter in named_parameters(optimizer)
        for tensor in optimizer.state[parameter].values()
    ]


def _tables(config: TrainerConfig) -> tuple[list[Held], int]:
    """What the Engram tables take on each rank, and their bytes in a checkpoint."""
    model, mesh = config.model, config.parallel
    if not model.engram_layers:
        return [], 0
    learns = model.engram.store != "mapped" and config.optim.table_rule != "frozen"
    less = "a larger parallel.cp, or a smaller parallel.engram_window_bytes"
    windows = np.full(mesh.world, _windows(config, learns=learns), dtype=np.int64)
    held = [
        Held("Engram windows", windows, less, True),
    ]
    if model.engram.store == "mapped":
        return held, 0
    host, dim = model.engram.store == "host", model.engram_head_dim
    rank = np.arange(mesh.world)
    replicas = mesh.world // mesh.owners
    rows = np.zeros(mesh.world, dtype=np.int64)
    state, saved = np.zeros(mesh.world, dtype=np.int64), 0
    for count in _table_rows(model):
        own = chunks(count, mesh.owners)
        mastered = np.stack([chunks(int(n), replicas) for n in own])  # [owners, replicas]
        rows += own[rank % mesh.owners]
        by_size = {int(n): _table_state(config, int(n)) for n in np.unique(mastered)}
        state += np.vectorize(by_size.__getitem__)(mastered)[
            rank % mesh.owners, rank // mesh.owners
        ]
        saved += count * dim * _FP32 + sum(by_size[int(n)] for n in mastered.flatten())
    more = "a larger parallel.engram_owners, or model.engram.store=host"
    held.append(Held("Engram rows", rows * dim * _FP32, more, host=host))
    held.append(
        Held("Engram optimiser", state, "more ranks, or model.engram.store=host", host=host)
    )
    return held, saved


def _table_state(config: TrainerConfig, rows: int) -> int:
    """Bytes of the table optimiser's state for this many rows of one table."""
    weight = torch.empty(rows, config.model.engram_head_dim, device="meta")
    store: Any = SimpleNamespace(
        layers=(0,),
        primary=[PrimaryTable(0, 0, weight)],
        as_global=lambda index, tensor: tensor,
    )
    optimizer = build_table_optimizer(cast(Any, store), config.optim)
    if optimizer is None:
        return 0
    return sum(t.numel() * t.element_size() for t in optimizer.tensors().values())


def _table_rows(model: ModelConfig) -> tuple[int, ...]:
    return model.engram_num_embeddings[: len(model.engram_layers)]


def _table_values(model: ModelConfig) -> int:
    return sum(_table_rows(model)) * model.engram_head_dim


def tokens_of_a_rank(config: TrainerConfig) -> int:
    """Of one micro-batch, padding included: cp ranks take equal shares of aligned length."""
    unit = config.model.alignment
    share = -(-config.data.pack_length // (unit * config.parallel.cp)) * unit
    return config.train.packs_per_micro_batch * share


def _windows(config: TrainerConfig, *, learns: bool) -> int:
    """Two windows of fetched rows, fp32, and their gradients: one in use and one on its way. A
    window takes a micro-batch whole, here one that reads no row twice."""
    model = config.model
    row = model.engram_head_dim * _FP32 * (2 if learns else 1)
    reads = tokens_of_a_rank(config) * model.engram_columns * len(model.engram_layers)
    window = max(config.parallel.engram_window_bytes // row, reads)
    return min(2 * window, reads * _micro_batches(config)) * row


def _micro_batches(config: TrainerConfig) -> int:
    groups = config.parallel.world // config.parallel.cp
    return config.train.packs_per_step // (groups * config.train.packs_per_micro_batch)


def _gathered(parameters: dict[str, nn.Parameter], config: TrainerConfig) -> Held:
    """The most that FSDP gathers at a time: a layer and the next one in the model's type, the
    layer's whole gradient, and its fp32 copy to be summed; or the head in fp32, likewise."""
    mesh, width = config.parallel, 2 if config.model.dtype == "bfloat16" else _FP32
    layers: dict[str, int] = {}
    for name, parameter in parameters.items():
        if not is_island(name):
            part = parameter.numel() // (mesh.ep if _EXPERT.search(name) else 1)
            group = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
            layers[group] = layers.get(group, 0) + part
    layers.pop("", None)
    head = parameters["head.weight"].numel() * 3 * _FP32
    layer = max(layers.values()) * (3 * width + _FP32)
    most = max(head, layer) if mesh.world > 1 else 0
    return Held(
        "gathered layers",
        np.full(mesh.world, most, dtype=np.int64),
        "a larger parallel.ep" if layer > head else "",
        estimate=True,
    )


def _inputs(config: TrainerConfig) -> np.ndarray:
    """The residual streams that every layer keeps of one micro-batch until its backward."""
    model = config.model
    width = 2 if model.dtype == "bfloat16" else _FP32
    streams = tokens_of_a_rank(config) * model.hc_mult * model.hidden_size * width
    return np.full(config.parallel.world, streams * model.num_hidden_layers, dtype=np.int64)


def _active(parameters: dict[str, nn.Parameter], model: ModelConfig) -> int:
    """Without the experts that a token is not sent to, the image tower, and the rows of embedding
    and tables that it does not read."""
    found = model.engram_columns * model.engram_head_dim * len(model.engram_layers)
    for name, parameter in parameters.items():
        if _EXPERT.search(name):
            found += parameter.numel() // model.n_routed_experts * model.num_experts_per_tok
        elif name == "embed.weight":
            found += model.hidden_size
        elif not name.startswith(("vision.", "aligner.", "image_")):
            found += parameter.numel()
    return found
