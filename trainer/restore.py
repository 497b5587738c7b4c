"""A model out of a run's checkpoint, or out of a folder of weights, for those who only read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from model.config import EngramStoreConfig, ModelConfig
from model.empty import give_memory, without_memory
from model.engram.mapped import MappedStore
from model.engram.owners import OwnerStore
from model.engram.store import RowStore
from model.parallel.mesh import Mesh
from model.released.files import open_folder
from model.transformer import DeepseekV41
from trainer.checkpoint.reading import read_tensors
from trainer.config import ParallelConfig, TrainerConfig
from trainer.device import CPU
from trainer.learner import build_model, build_store, weights_by_name
from trainer.ranks import Ranks
from trainer.state import TrainState
from trainer.weights import load_weights


def restored_model(
    config: TrainerConfig, folder: Path, *, device: torch.device = CPU
) -> tuple[DeepseekV41, RowStore, TrainState]:
    """Model and tables of the whole checkpoint `folder`, in this process alone.

    However many ranks wrote it. DataError for mapped tables that are not those it was trained
    with; ValueError when they cannot be read, or the configuration is not the checkpoint's.
    """
    alone = replace(config, parallel=ParallelConfig())
    model = build_model(alone, mesh=Mesh(), device=device, scratch=False)
    store = build_store(alone, mesh=Mesh(), device=device, scratch=False)
    read_tensors(folder, weights_by_name(model, store), whole=False)
    state = TrainState.read(folder)
    state.require_same_tables(store.fingerprint(), folder=folder)
    return model, store, state


def folder_model(
    folder: Path, *, device: torch.device = CPU
) -> tuple[ModelConfig, DeepseekV41, RowStore]:
    """The model of a folder in the released layout: config.json and safetensors, quantised or not.

    Its Engram rows are read out of the folder when they are needed. ValueError, or DataError,
    names what is wrong with config.json, and with weights.
    """
    document = open_folder(folder).json("config.json")
    assert document is not None, folder
    config = replace(ModelConfig.from_released(document), weights=str(folder))
    if config.engram_layers:
        config = replace(config, engram=EngramStoreConfig("mapped", str(folder)))
    with without_memory():
        model = DeepseekV41(config)
    give_memory(model, device=device)
    store: RowStore
    if config.engram_layers:  # the whole tables in memory would be the largest part by far
        store = MappedStore(config, token_map=None, device=device)
    else:
        store = OwnerStore(config, seed=None, device=device)
    load_weights(config, model, store, ranks=Ranks(), progress=lambda done, total: None)
    return config, model, store
