"""Which ranks each group of the mesh joins, and what its messages carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.parallel.group import Group
from model.parallel.mesh import Mesh, build_mesh
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def members(sizes: dict[str, Any]) -> dict[str, object]:
    mesh = build_mesh(**sizes)
    groups = {name: getattr(mesh, name) for name in ("cp", "ep", "owners", "replicas")}
    mine = torch.tensor([dist.get_rank()])
    found: dict[str, object] = {
        name: group.all_gather(mine).flatten().tolist() if group.size > 1 else [dist.get_rank()]
        for name, group in groups.items()
    }
    assert mesh.meshes is not None
    for name in ("dense", "experts", "ep"):
        found[f"{name} mesh"] = getattr(mesh.meshes, name).mesh.tolist()
    return found | {"dp": (mesh.dp_index, mesh.dp_size)}


def test_groups_of_eight_ranks(ranks: Ranks) -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2, "engram_owners": 4}
    found = ranks.run(8, members, sizes)
    assert [f["cp"] for f in found] == [[n - n % 2, n - n % 2 + 1] for n in range(8)]
    assert [f["ep"] for f in found] == [f["cp"] for f in found]
    assert [f["owners"] for f in found] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [f["replicas"] for f in found] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    assert [f["dp"] for f in found] == [(n, 4) for n in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert found[5]["dense mesh"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found[5]["experts mesh"] == [[1, 3], [5, 7]]


def exchange() -> list[list[Any]]:
    """Rank r sends r rows of value 10 r + d to rank d."""
    group = build_mesh(dp_shard=3).world
    me = group.rank
    rows = torch.tensor([[10 * me + d] for d in range(3) for _ in range(me)], dtype=torch.int64)
    got = group.all_to_all_rows(rows.view(-1, 1), send=[me] * 3, receive=[0, 1, 2])
    summed = group.reduce_scatter_sum(torch.arange(3.0)[:, None] + me)
    return [got.flatten().tolist(), [group.any(me == 2), group.any(False), summed.item()]]


def test_messages(ranks: Ranks) -> None:
    found = ranks.run(3, exchange)
    for me, (rows, (one, none, summed)) in enumerate(found):
        assert rows == [10 + me, 20 + me, 20 + me]
        assert (one, none, summed) == (True, False, 3 * me + 3)


def test_a_mesh_that_does_not_divide_is_refused_on_every_rank(ranks: Ranks) -> None:
    found = ranks.run(2, refusal)
    assert found[0] == found[1]
    assert "ep=3 must divide dp_shard * cp = 2" in found[0]


def refusal() -> str:
    with pytest.raises(ValueError, match="must divide") as error:
        build_mesh(dp_shard=2, ep=3)
    return str(error.value)


def test_one_rank_needs_no_process_group() -> None:
    assert build_mesh() == Mesh()
    rows = torch.arange(4)
    assert Group().all_to_all_rows(rows, send=[4], receive=[4]) is rows
