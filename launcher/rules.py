"""Rules between a run's settings, and between them and this machine.

A rule takes the sections that it needs, by their names in RunConfig (and `environ`), and returns
one message a problem, with the fix. It is skipped where one of its sections cannot be read. A rule
that takes `config` takes the whole, once nothing else is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from data.config import DataConfig
from launcher.backends.slurm.config import MARGIN_S, seconds
from launcher.config import LauncherConfig, ResilienceConfig, SweepConfig
from launcher.run_config import RunConfig
from model.config import ModelConfig
from trainer.config import EvalConfig, ParallelConfig, TrainConfig
from trainer.mesh_rules import (
    experts_are_divided_evenly,
    packs_reach_all_ranks,
    steps_are_dealt_out_evenly,
)

Rule = Callable[..., list[str]]

BYTES_PER_WEIGHT = 16  # fp32 weight, gradient and the two moments of AdamW


def mesh_fills_nodes(parallel: ParallelConfig, launcher: LauncherConfig) -> list[str]:
    world, nodes = parallel.world, launcher.nodes
    mesh = (
        f"parallel.dp_replicate={parallel.dp_replicate} x parallel.dp_shard={parallel.dp_shard} x "
        f"parallel.cp={parallel.cp} is a mesh of {world} ranks"
    )
    if launcher.kind == "local" and (world > 1 or nodes > 1):
        return [
            f"{mesh}, but launcher=local starts one; use launcher=torchrun, ray or slurm, or "
            "parallel=single"
        ]
    if nodes > 0 and world % nodes:
        return [f"{mesh}, which {nodes} nodes (launcher.nodes) cannot share evenly; use a divisor"]
    return []


def environment_fits_plan(parallel: ParallelConfig, environ: Mapping[str, str]) -> list[str]:
    """Started under torchrun or srun, every rank would be a run of its own."""
    given = environ.get("WORLD_SIZE")
    if given is None or given == str(parallel.world):
        return []
    return [
        f"WORLD_SIZE={given} in the environment, but the plan has {parallel.world} rank(s); "
        "start dsv41-train once, by itself (it starts its own ranks), or unset WORLD_SIZE"
    ]


def slurm_job_fits(
    parallel: ParallelConfig, launcher: LauncherConfig, resilience: ResilienceConfig
) -> list[str]:
    """Whether each rank gets a GPU, and the run time for more than its end."""
    slurm, found = launcher.slurm, []
    if launcher.kind != "slurm" or launcher.nodes < 1:
        return []
    ranks = parallel.world // launcher.nodes
    if slurm.gpus_per_node is not None and 0 < slurm.gpus_per_node < ranks:
        found.append(
            f"launcher.slurm.gpus_per_node={slurm.gpus_per_node}, but {ranks} ranks share a node "
            "(the mesh over launcher.nodes) and each takes one; use more nodes, or a smaller mesh"
        )
    warned = slurm.warning_s(resilience.grace_s)
    given = seconds(slurm.time) if slurm.time is not None else None
    if given is not None and given <= warned:
        found.append(
            f"launcher.slurm.time={slurm.time} is over {given} s after the start, but the run is "
            f"told to save {warned} s before its time ends (resilience.grace_s="
            f"{resilience.grace_s:g} and {MARGIN_S}); give more time, or less grace"
        )
    return found


def packs_fit_model(data: DataConfig, model: ModelConfig) -> list[str]:
    return data.model_problems(model)


def evaluation_has_documents(data: DataConfig, eval: EvalConfig) -> list[str]:
    if eval.every <= 0 or data.holdout > 0:
        return []
    return [
        f"eval.every={eval.every} needs documents held out, but data.holdout=0; "
        "use data.holdout=0.05, or eval.every=0"
    ]


def sweep_can_measure(sweep: SweepConfig, eval: EvalConfig) -> list[str]:
    if sweep.metric != "eval_loss" or eval.every > 0:
        return []
    return [
        "sweep.metric=eval_loss, but eval.every=0: there is none; use eval.every=N, or "
        "sweep.metric=loss"
    ]


def early_stops_have_tune(sweep: SweepConfig, launcher: LauncherConfig) -> list[str]:
    if sweep.scheduler is None or launcher.kind == "ray":
        return []
    return [
        f"sweep.scheduler={sweep.scheduler} works through Ray Tune, but this is launcher="
        f"{launcher.kind}; use launcher=ray, or sweep.scheduler=null"
    ]


def early_stops_save_steps(sweep: SweepConfig, train: TrainConfig) -> list[str]:
    grace = sweep.asha.grace_steps
    if sweep.scheduler is None or grace is None or grace < train.steps:
        return []
    return [
        f"sweep.asha.grace_steps={grace} leaves nothing of train.steps={train.steps} to be saved; "
        "use fewer, or null"
    ]


def data_is_there(data: DataConfig) -> list[str]:
    from data.errors import DataError
    from data.sources.config import FILES
    from data.sources.opening import source_files

    found = []
    for name, source in data.named_sources():
        if source.source not in FILES or not all(source.paths):
            continue
        for path in source.paths:
            try:
                files = source_files(replace(source, paths=(path,)), name=name)
            except DataError as error:
                found.append(f"{name}.paths: {error}")
                continue
            found += [
                f"{name}.paths: {file}: cannot be read; correct its permissions (chmod +r)"
                for file in files
                if not os.access(file, os.R_OK)
            ]
    return found


def tables_have_their_sizes(model: ModelConfig) -> list[str]:
    from model.engram.hashing import HashGeometry

    try:
        HashGeometry.from_config(model)
    except ValueError as error:
        return [f"model: {error}"]
    return []


def tokenizer_fits_model_and_kinds(data: DataConfig, model: ModelConfig) -> list[str]:
    from data.corpus import encoding_problems

    return encoding_problems(data, model)


def owners_can_number_their_rows(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    few = sum(model.engram_num_embeddings) < 2**31  # for one owner too
    if few or model.engram.store == "mapped" or parallel.owners < 1:
        return []
    from model.engram.division import Division

    try:
        Division(model.engram_num_embeddings, parallel.owners)
    except ValueError as error:
        return [str(error)]
    return []


def weights_fit_model(model: ModelConfig) -> list[str]:
    if not model.weights:
        return []
    from model.released.check import weights_problems
    from model.released.errors import shortened

    found = weights_problems(
        Path(model.weights).expanduser(), model, tables=model.engram.store != "mapped"
    )
    return [f"model.weights={model.weights}: {problem}" for problem in shortened(found)]


def mapped_tables_fit_model(model: ModelConfig, data: DataConfig) -> list[str]:
    if model.engram.store != "mapped":
        return []
    from data.tokenizer import load_token_map, tokenizer_problems
    from model.engram.tables.source import table_problems

    # A tokenizer with faults of its own has its own rule.
    sound = data.tokenizer and not tokenizer_problems(data.tokenizer, model)
    return table_problems(model, token_map=load_token_map(data.tokenizer) if sound else None)


def model_fits_memory(
    model: ModelConfig, parallel: ParallelConfig, launcher: LauncherConfig
) -> list[str]:
    """A lower bound only, from the parts that dominate; the system would kill us without a word.

    Not where the ranks run on other machines than this one.
    """
    ranks = {"local": 1, "torchrun": parallel.world // max(1, launcher.nodes)}.get(launcher.kind, 0)
    if min(parallel.dp_shard, parallel.cp, parallel.owners, ranks) < 1:
        return []
    experts = model.num_hidden_layers * model.n_routed_experts
    weights = 3 * experts * model.hidden_size * model.moe_intermediate_size
    weights += 2 * model.vocab_size * model.hidden_size
    held = weights / (parallel.dp_shard * parallel.cp)
    if model.engram.store != "mapped":
        tables = sum(model.engram_num_embeddings) * model.engram_head_dim
        weights, held = weights + tables, held + tables / parallel.owners
    needed = held * BYTES_PER_WEIGHT * ranks
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= present:
        return []
    return [
        f"model: {weights / 1e9:.1f} B weights need at least {needed / 1e9:,.0f} GB here with "
        f"their gradients and moments, and this machine has {present / 1e9:,.0f} GB; use "
        "model=tiny or fewer layers, experts or Engram rows"
    ]


MESH_RULES: tuple[Rule, ...] = (
    experts_are_divided_evenly,
    packs_reach_all_ranks,
    steps_are_dealt_out_evenly,
)


def devices_have_room(config: RunConfig) -> list[str]:
    """Whether each rank's part fits into its accelerator, where its memory is known."""
    if config.cluster.device_memory_gb is None:
        return []
    from launcher.plan.holdings import holdings
    from launcher.plan.memory import memory_problems

    return memory_problems(config, holdings(config))


DATA_RULES: tuple[Rule, ...] = (packs_fit_model, data_is_there, tokenizer_fits_model_and_kinds)
RULES: tuple[Rule, ...] = (
    *DATA_RULES,
    mesh_fills_nodes,
    slurm_job_fits,
    environment_fits_plan,
    *MESH_RULES,
    evaluation_has_documents,
    sweep_can_measure,
    early_stops_have_tune,
    early_stops_save_steps,
    tables_have_their_sizes,
    owners_can_number_their_rows,
    weights_fit_model,
    mapped_tables_fit_model,
    model_fits_memory,
    devices_have_room,
)
# What must hold wherever the run will go: nothing of this machine, its files or its environment.
PLAN_RULES: tuple[Rule, ...] = (
    packs_fit_model,
    tokenizer_fits_model_and_kinds,
    *MESH_RULES,
    evaluation_has_documents,
    tables_have_their_sizes,
    owners_can_number_their_rows,
)
