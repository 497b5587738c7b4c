"""The plan of a run as plain data, and as a table for people."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from launcher.plan.holdings import Holdings, sum_of, tokens_of_a_rank
from launcher.run_config import RunConfig

NOT_COUNTED = (
    "activations inside a layer",
    "the gradients of the Engram rows that a step reads",
    "images in the tower",
    "what an optimiser needs while it steps",
    "buffers of the communication library",
    "fragmentation",
)


def plan_data(config: RunConfig, held: Holdings) -> dict[str, Any]:
    """Everything that `dsv41 plan` tells, as --json prints it. Sizes are bytes."""
    mesh, train, model = config.parallel, config.train, config.model
    groups = mesh.world // mesh.cp
    shards = mesh.dp_shard * mesh.cp
    micro_batches = train.packs_per_step // (groups * train.packs_per_micro_batch)
    device = held.device_bytes()
    host = [c.bytes for c in held.classes if c.host]
    memory = config.cluster.device_memory_gb
    return {
        "mesh": {
            "ranks": mesh.world,
            "dp_replicate": mesh.dp_replicate,
            "dp_shard": mesh.dp_shard,
            "cp": mesh.cp,
            "ep": mesh.ep,
            "engram_owners": mesh.owners,
            "engram_replicas": mesh.world // mesh.owners,
            "ranks_of_a_copy": shards,
            "experts_of_a_rank": model.n_routed_experts // mesh.ep,
            "ranks_of_an_expert": shards // mesh.ep,
        },
        "parameters": {
            "total": held.parameters + held.table_values,
            "model": held.parameters,
            "engram_tables": held.table_values,
            "active": held.active,
        },
        "step": {
            "packs": train.packs_per_step,
            "tokens": train.packs_per_step * config.data.pack_length,
            "micro_batches_of_a_rank": micro_batches,
            "tokens_of_a_rank": micro_batches * tokens_of_a_rank(config),
        },
        "rank": {
            c.name: {
                "max": int(c.bytes.max()),
                "mean": float(c.bytes.mean()),
                "memory": "host" if c.host else "device",
                "estimate": c.estimate,
                "note": c.note,
            }
            for c in held.classes
        },
        "device": {
            "max": int(device.max()),
            "mean": float(device.mean()),
            "memory": None if memory is None else round(memory * 1e9),
        },
        "host": {"max": int(sum_of(host).max()) if host else 0},
        "checkpoint": {
            "bytes": held.checkpoint_bytes,
            "kept": config.checkpoint.keep * held.checkpoint_bytes,
        },
        "not_counted": list(NOT_COUNTED),
    }


def show(data: dict[str, Any], config: RunConfig, *, as_json: bool) -> None:
    """Print a plan on standard output: as JSON, or in lines and a table of bytes per rank."""
    if as_json:
        print(json.dumps(data, indent=2))
        return
    out = Console(highlight=False, soft_wrap=True)
    mesh, count, step = data["mesh"], data["parameters"], data["step"]
    lines = {
        "run": config.name,
        "ranks": f"{mesh['ranks']:,} = dp_replicate {mesh['dp_replicate']} x dp_shard "
        f"{mesh['dp_shard']} x cp {mesh['cp']}; {mesh['ranks_of_a_copy']:,} share one copy of the "
        "model",
        "experts": f"ep {mesh['ep']}: {mesh['experts_of_a_rank']:,} a rank, each cut over "
        f"{mesh['ranks_of_an_expert']} rank(s)",
        "Engram": f"{mesh['engram_owners']} owner(s), {mesh['engram_replicas']} replica(s), "
        f"store {config.model.engram.store}",
        "parameters": f"{_count(count['total'])}, {_count(count['engram_tables'])} of them in "
        f"Engram tables; a token meets {_count(count['active'])}",
        "step": f"{step['packs']:,} packs, {_count(step['tokens'])} tokens; a rank computes "
        f"{step['tokens_of_a_rank']:,} in {step['micro_batches_of_a_rank']:,} micro-batch(es)",
        "checkpoint": f"{_size(data['checkpoint']['bytes'])}, "
        f"{_size(data['checkpoint']['kept'])} for the {config.checkpoint.keep} that are kept",
    }
    for name, text in lines.items():
        out.print(f"{name:<11} {text}")
    out.print()
    out.print(_table(data, plain=not out.is_terminal))
    out.print(f"\nNot counted: {', '.join(data['not_counted'])}.")


def _table(data: dict[str, Any], *, plain: bool) -> Table:
    table = Table(box=None if plain else box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    device, memory = data["device"], data["device"]["memory"]
    table.add_column("bytes per rank", footer="on a device")
    table.add_column("most", justify="right", footer=_size(device["max"]))
    table.add_column("mean", justify="right", footer=_size(device["mean"]))
    table.add_column("", footer="" if memory is None else f"of {_size(memory)}")
    for name, held in data["rank"].items():
        notes = ["about"] * held["estimate"] + ["in host memory"] * (held["memory"] == "host")
        notes += [held["note"]] * bool(held["note"])
        table.add_row(name, _size(held["max"]), _size(held["mean"]), ", ".join(notes))
    return table


def _size(number: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= unit:
            return f"{number / unit:,.2f} {name}"
    if not number:
        return "0"
    return f"{number / 1e3:,.2f} kB"


def _count(number: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,}"
