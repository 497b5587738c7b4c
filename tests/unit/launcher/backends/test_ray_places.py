"""Which rank an actor of Ray becomes, and which settings of a cluster make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.backends.protocol import Plan
from launcher.backends.ray.cluster import demand
from launcher.backends.ray.config import RayConfig, host_and_port
from launcher.backends.ray.rank import Seat, places
from launcher.config import LauncherConfig
from launcher.run_dir import RunFolder


def plan(*, world: int, nodes: int) -> Plan:
    return Plan(RunFolder(Path("run")), world=world, nodes=nodes, grace_s=1.0)


def seats(*gpus: tuple[str, str]) -> list[Seat]:
    return [Seat(node, f"10.0.0.{node}", (gpu,) if gpu else ()) for node, gpu in gpus]


def test_ranks_of_a_node_are_neighbours_and_see_its_gpus_in_their_order(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PATH_OF_THE_DRIVER", "x")
    found = places(
        plan(world=4, nodes=2), seats(("1", "3"), ("1", "0"), ("2", "1"), ("2", "2")), port=99
    )
    names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
    assert [tuple(place[name] for name in names) for place in found] == [
        ("0", "0", "3,0"),
        ("1", "1", "3,0"),
        ("2", "0", "1,2"),
        ("3", "1", "1,2"),
    ]
    assert {(p["WORLD_SIZE"], p["LOCAL_WORLD_SIZE"], p["MASTER_PORT"]) for p in found} == {
        ("4", "2", "99")
    }
    assert {place["MASTER_ADDR"] for place in found} == {"10.0.0.1"}
    assert {place["NCCL_DEBUG"] for place in found} == {"INFO"}
    assert "PATH_OF_THE_DRIVER" not in found[0]


def test_ranks_of_one_node_meet_on_it_and_without_gpus_none_are_hidden() -> None:
    (place,) = places(plan(world=1, nodes=1), seats(("7", "")), port=99)
    assert place["MASTER_ADDR"] == "127.0.0.1"
    assert "CUDA_VISIBLE_DEVICES" not in place


def test_a_gpu_for_each_rank_where_there_are_any() -> None:
    shared = plan(world=8, nodes=2)
    assert demand(RayConfig(), shared, gpus=True) == {"CPU": 4, "GPU": 4}
    assert demand(RayConfig(cpus_per_rank=3), shared, gpus=False) == {"CPU": 12}
    assert demand(RayConfig(gpus_per_rank=0), shared, gpus=True) == {"CPU": 4}


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("auto", ("auto", 0)),
        ("head:6379", ("head", 6379)),
        ("[::1]:6379", ("::1", 6379)),
        ("head", None),
        ("head:", None),
        ("head:0", None),
        ("head:70000", None),
        ("ray://head:10001", None),
    ],
)
def test_addresses(address: str, found: tuple[str, int] | None) -> None:
    assert host_and_port(address) == found
    assert bool(RayConfig(address=address).problems()) == (found is None)


def test_all_problems_are_told_at_once() -> None:
    config = RayConfig(address="ray://head:1", cpus_per_rank=0, gpus_per_rank=2, wait_s=-1)
    found = "\n".join(config.problems())
    for name in ("address=ray://head:1", "cpus_per_rank=0", "gpus_per_rank=2", "wait_s=-1"):
        assert f"launcher.ray.{name}" in found


def test_several_nodes_need_a_running_cluster() -> None:
    (problem,) = LauncherConfig(kind="ray", nodes=2).problems()
    assert "launcher.ray.address=HOST:PORT" in problem
    assert not LauncherConfig(kind="ray", nodes=2, ray=RayConfig(address="auto")).problems()
