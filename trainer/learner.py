"""What learns: the model, its Engram tables, and the optimisers of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Stretch
from data.tokenizer import load_token_map
from model.empty import give_memory, without_memory
from model.engram.mapped import MappedStore
from model.engram.owners import OwnerStore, table_device
from model.engram.store import RowStore
from model.init import init_weights
from model.names import table_name
from model.parallel.mesh import Mesh
from model.released.load import Progress
from model.transformer import DeepseekV41
from trainer.config import TrainerConfig
from trainer.device import CPU
from trainer.optim import ParameterOptimizer, build_optimizer, optimizer_tensors
from trainer.ranks import Ranks
from trainer.sharding import mesh_of, shard_model
from trainer.table_optim import TableOptimizer, build_table_optimizer
from trainer.weights import load_weights


@dataclass(frozen=True)
class Learner:
    """What a training step reads and changes, and this rank's place. Frozen tables have no
    optimiser."""

    mesh: Mesh
    model: DeepseekV41
    store: RowStore
    optimizer: ParameterOptimizer
    table_optimizer: TableOptimizer | None

    @property
    def stretch(self) -> Stretch:
        """The columns of each row that this rank takes."""
        cp = self.mesh.cp
        return Stretch(cp.rank, cp.size, self.model.config.alignment)

    def tensors(self) -> dict[str, Tensor]:
        """All live tensors by name, the whole of what a checkpoint must hold.

        Names begin with model/, optimizer/, tables/ or table_optimizer/. Writing into them
        restores the state, so they serve both saving and loading. Tables that are read out of
        files stay there.
        """
        found = weights_by_name(self.model, self.store)
        for name, tensor in optimizer_tensors(self.optimizer).items():
            found[f"optimizer/{name}"] = tensor
        if self.table_optimizer is not None:
            for name, tensor in self.table_optimizer.tensors().items():
                found[f"table_optimizer/{name}"] = tensor
        return found


def weights_by_name(model: DeepseekV41, store: RowStore) -> dict[str, Tensor]:
    """The part of `Learner.tensors` that a forward reads: model/ and tables/."""
    found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    if isinstance(store, OwnerStore):
        for index, table in enumerate(store.primary):
            found[f"tables/{table_name(table.layer)}"] = store.as_global(index, table.weight)
    return found


def build_learner(
    config: TrainerConfig,
    *,
    mesh: Mesh | None = None,
    ranks: Ranks | None = None,
    device: torch.device = CPU,
    restored: bool = False,
    progress: Progress = lambda done, total: None,
) -> Learner:
    """A model at the start of its training, with its optimisers.

    Its values are a function of the configuration alone, or those of config.model.weights, each
    rank reading its own share; with `restored` they are undefined, for a checkpoint to fill. mesh:
    that of config.parallel, made here if not given; with several ranks the default process group
    must exist. device: of parameters, gradients and what the forward is given.
    ValueError lists what keeps mapped tables from being read, DataError what is wrong with weights.
    """
    scratch = not restored and not config.model.weights
    if mesh is None:
        tables = table_device(config.model, device)
        mesh = mesh_of(config.parallel, device=device, tables=tables)
    store = build_store(config, mesh=mesh, device=device, scratch=scratch)
    model = build_model(config, mesh=mesh, device=device, scratch=scratch)
    if config.model.weights and not restored:
        ranks = ranks or Ranks.from_process_group()
        load_weights(config.model, model, store, ranks=ranks, progress=progress)
    optim, tables = config.optim, None
    if isinstance(store, OwnerStore):
        tables = build_table_optimizer(store, optim)
    return Learner(
        mesh=mesh,
        model=model,
        store=store,
        optimizer=build_optimizer(model, optim, config.model),
        table_optimizer=tables,
    )


def build_store(
    config: TrainerConfig, *, mesh: Mesh, device: torch.device = CPU, scratch: bool
) -> RowStore:
    """The Engram tables: those in files, or in memory, with initial values if from scratch."""
    window_bytes = config.parallel.engram_window_bytes
    if config.model.engram.store == "mapped":
        return MappedStore(
            config.model,
            token_map=load_token_map(config.data.tokenizer),
            world=mesh.world,
            window_bytes=window_bytes,
            device=device,
        )
    return OwnerStore(
        config.model,
        seed=config.seed if scratch else None,
        mesh=mesh,
        learns=config.optim.table_rule != "frozen",
        window_bytes=window_bytes,
        device=device,
    )


def build_model(
    config: TrainerConfig, *, mesh: Mesh, device: torch.device = CPU, scratch: bool
) -> DeepseekV41:
    """This rank's share of the model over `mesh`, with initial values if it starts from scratch.

    It is made and cut without memory first: no rank ever holds the whole, unless it is the only
    one.
    """
    with without_memory():
        model = DeepseekV41(
            config.model,
            distill=config.indexer.distills(config.model),
            recompute=config.parallel.recompute,
            mesh=mesh,
        )
    shard_model(model, mesh, dtype=getattr(torch, config.model.dtype))
    give_memory(model, device=device)
    if scratch:
        init_weights(model, seed=config.seed, std=config.model.initializer_range)
    return model
