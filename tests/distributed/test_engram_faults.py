"""What goes wrong with Engram rows on one rank, or between two: all ranks hear of it at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from model.config import EngramStoreConfig, ModelConfig
from model.engram.exchange import Exchange, Pending
from model.engram.mapped import MappedStore
from model.engram.owners import OwnerStore
from model.engram.store import RowStore
from model.engram.tables.file_rows import BadTableError
from model.engram.tables.table import Table
from model.names import table_name
from model.parallel.mesh import build_mesh
from tests.distributed.test_engram_owners import config_of, rows_of
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

ROWS = (50, 51)
SICK = 1  # the rank that something happens to


def refusal(work: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        work()
    return str(raised.value)


def bad_rows(path: str | None) -> list[str]:
    """What each way to ask for rows says where one rank asks for a row that its table lacks."""
    config, mesh = config_of(ROWS), build_mesh(dp_shard=dist.get_world_size(), engram_owners=1)
    store: RowStore = OwnerStore(config, seed=0, mesh=mesh)
    if path is not None:
        config = dataclasses.replace(config, engram=EngramStoreConfig("mapped", path))
        store = MappedStore(config, token_map=None, world=mesh.world)
    good = [rows_of(0, number, ROWS) for number in range(2)]
    bad = [rows.clone() for rows in good]
    if mesh.world.rank == SICK:
        bad[1][0, 3, 1, 2] = 51
    told = [
        refusal(lambda: store.read_ahead(bad)),
        refusal(lambda: next(store.windows(bad))),
        refusal(lambda: store.open_window(bad)),
    ]
    assert len(next(store.windows(good)).inverses) == 2  # the ranks are still in step
    store.close()
    return told


def write_tables(config: ModelConfig, folder: Path) -> None:
    one = OwnerStore(config, seed=0)
    tables = zip(one.layers, one.weight, strict=True)
    save_file(
        {table_name(n): weight.contiguous() for n, weight in tables}, folder / "model.safetensors"
    )


@pytest.mark.parametrize("mapped", [False, True], ids=["learning", "mapped"])
def test_a_row_that_is_none_on_one_rank_stops_all(
    ranks: Ranks, tmp_path: Path, mapped: bool
) -> None:
    write_tables(config_of(ROWS), tmp_path)
    found = ranks.run(2, bad_rows, str(tmp_path) if mapped else None)
    assert found[0] == found[1]
    for told in found[0]:
        assert "layer 3 reach from" in told and "to 51, outside its 51 rows" in told


def damaged_file(path: str) -> str:
    mesh = build_mesh(dp_shard=dist.get_world_size(), engram_owners=1)
    config = dataclasses.replace(config_of(ROWS), engram=EngramStoreConfig("mapped", path))
    store = MappedStore(config, token_map=None, world=mesh.world)

    def damaged(table: Table, ids: Any) -> Tensor:
        raise BadTableError("row 3 is damaged")

    with pytest.MonkeyPatch.context() as patch:
        if mesh.world.rank == SICK:
            patch.setattr(Table, "read", damaged)
        told = refusal(lambda: next(store.windows([rows_of(0, 0, ROWS)])), BadTableError)
    store.close()
    return told


def test_a_table_damaged_for_one_rank_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    write_tables(config_of(ROWS), tmp_path)
    healthy, sick = ranks.run(2, damaged_file, str(tmp_path))
    assert sick == "row 3 is damaged"
    assert healthy == "another rank could not read its Engram rows; see its log"


def changing_network(what: str) -> list[str]:
    """Engram exchanges while one rank's messages of a kind arrive changed."""
    mesh = build_mesh(dp_shard=dist.get_world_size(), engram_owners=2)
    begin, all_to_all = Exchange.begin, dist.all_to_all_single

    def shifted(tensor: Tensor) -> Tensor:
        """By one byte, as a plug-in has done it."""
        return tensor.view(torch.uint8).roll(1).view(tensor.dtype)

    def begin_shifted(self: Exchange, send: dict[int, Tensor], receive: Any) -> Pending:
        kind = torch.float32 if what == "rows" else torch.int32
        send = {r: shifted(t) if t.dtype == kind else t for r, t in send.items()}
        return begin(self, send, receive)

    def counts_shifted(out: Tensor, sent: Tensor, **options: Any) -> Any:
        return all_to_all(out, shifted(sent), **options)

    told = []
    with pytest.MonkeyPatch.context() as patch:
        if mesh.world.rank == SICK and what == "counts":
            patch.setattr(dist, "all_to_all_single", counts_shifted)
        elif mesh.world.rank == SICK:
            patch.setattr(Exchange, "begin", begin_shifted)
        told.append(refusal(lambda: Exchange(mesh.world)))
    store = OwnerStore(config_of(ROWS), seed=0, mesh=mesh)
    if what == "ids":  # a network that begins to do so later
        with pytest.MonkeyPatch.context() as patch:
            if mesh.world.rank == SICK:
                patch.setattr(Exchange, "begin", begin_shifted)
            told.append(refusal(lambda: next(store.windows([rows_of(0, 0, ROWS)]))))
    return told


@pytest.mark.parametrize("what", ["counts", "ids", "rows"])
def test_a_network_that_changes_numbers_is_found_before_rows_are_read(
    ranks: Ranks, what: str
) -> None:
    found = ranks.run(4, changing_network, what)
    assert all(told == found[0] for told in found)
    assert "arrive changed, so Engram rows would be mixed up" in found[0][0]
    if what == "ids":
        assert "row ids arrived changed from another rank" in found[0][1]


def stale_copy(owners: int) -> tuple[str, str]:
    world = dist.get_world_size()
    store = OwnerStore(
        config_of(ROWS), seed=0, mesh=build_mesh(dp_shard=world, engram_owners=owners)
    )
    before = store.fingerprint()["tables"]
    if dist.get_rank() == SICK:
        store.weight[1][0, 3] += 1
    after = store.fingerprint()["tables"]
    assert after[0] == before[0]
    return before[1]["sampled_rows"], after[1]["sampled_rows"]


@pytest.mark.parametrize("owners", [1, 2])
def test_a_changed_row_shows_in_the_fingerprint_on_all_ranks(ranks: Ranks, owners: int) -> None:
    found = ranks.run(2, stale_copy, owners)
    assert found[0] == found[1]
    before, after = found[0]
    assert before == OwnerStore(config_of(ROWS), seed=0).fingerprint()["tables"][1]["sampled_rows"]
    assert (after == "copies of them differ") if owners == 1 else after not in (before, "")
