"""How the ranks of a run divide the model, the sequence, the experts and the Engram tables.

Global ranks count cp fastest, then dp_shard, then dp_replicate:

    rank = (replicate * dp_shard + shard) * cp + cp_rank

The F = dp_shard * cp adjacent ranks of one replica hold one copy of the parameters together (FSDP).
Among them `ep` adjacent ranks divide the experts, and the F / ep ranks with equal place in their ep
groups divide each expert's matrices. Engram tables are divided over `engram_owners` adjacent ranks,
whatever the rest of the mesh is, and the world / engram_owners owner groups are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from model.parallel.group import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Meshes:
    """Device meshes for what torch shards.

    dense: [dp_replicate, F] or, with one replica, [F]. experts: [dp_replicate, F / ep] or [F / ep],
    over which FSDP shards what expert parallelism leaves to a rank. ep: [ep].
    tables: [owners, replicas], the place of a table's rows.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh
    tables: DeviceMesh


@dataclass(frozen=True)
class Mesh:
    """This rank's groups.

    dp_index of dp_size: which share of a step's micro-batches this rank takes; all ranks of a cp
    group take the same. owners: the ranks among which a table's rows are divided. replicas: the
    ranks that own the same rows. meshes: None for a world of one rank.
    """

    world: Group = field(default_factory=Group)
    cp: Group = field(default_factory=Group)
    ep: Group = field(default_factory=Group)
    owners: Group = field(default_factory=Group)
    replicas: Group = field(default_factory=Group)
    meshes: Meshes | None = None

    @property
    def dp_index(self) -> int:
        return self.world.rank // self.cp.size

    @property
    def dp_size(self) -> int:
        return self.world.size // self.cp.size


def build_mesh(
    *,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    ep: int = 1,
    engram_owners: int = 1,
    device: str = "cpu",
    tables: str = "cpu",
) -> Mesh:
    """The groups of this rank in the default process group; all ranks call it together.

    device, tables: the kinds of device that hold parameters and Engram tables. A world of one needs
    no process group. ValueError when the sizes do not divide.
    """
    world = dp_replicate * dp_shard * cp
    if world == 1:
        return Mesh()
    if dist.get_world_size() != world:
        raise ValueError(
            f"a mesh of {dp_replicate} x {dp_shard} x {cp} needs {world} ranks, and "
            f"{dist.get_world_size()} have joined"
        )
    shards = dp_shard * cp
    if shards % ep or world % engram_owners:
        raise ValueError(
            f"ep={ep} must divide dp_shard * cp = {shards}, and engram_owners={engram_owners} "
            f"must divide the {world} ranks"
        )
    from torch.distributed.device_mesh import DeviceMesh

    numbers = torch.arange(world)
    root = DeviceMesh(
        device,
        numbers.view(dp_replicate, shards // ep, ep),
        mesh_dim_names=("dp_replicate", "expert_shard", "ep"),
    )
    copied = dp_replicate > 1
    dense = DeviceMesh(
        device,
        numbers.view(dp_replicate, shards),
        mesh_dim_names=("dp_replicate", "dense_shard"),
    )
    by_owner = numbers.view(-1, engram_owners).t().contiguous()
    owner_mesh = DeviceMesh(tables, by_owner, mesh_dim_names=("owner", "replica"))
    meshes = Meshes(
        dense=dense if copied else dense["dense_shard"],
        experts=root["dp_replicate", "expert_shard"] if copied else root["expert_shard"],
        ep=root["ep"],
        tables=owner_mesh,
    )
    sequence = DeviceMesh(device, numbers.view(-1, cp), mesh_dim_names=("dp", "cp"))
    return Mesh(
        world=Group(dist.get_rank(), world, dist.group.WORLD),
        cp=_group(sequence["cp"]),
        ep=_group(root["ep"]),
        owners=_group(owner_mesh["owner"]),
        replicas=_group(owner_mesh["replica"]),
        meshes=meshes,
    )


def _group(mesh: DeviceMesh) -> Group:
    if mesh.size() == 1:
        return Group()
    return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group())
