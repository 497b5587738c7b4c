"""Whether a run with other settings can begin with a checkpoint: everything that is against it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher import freeze
from launcher.resume import GIVEN_NOW
from launcher.run_config import RunConfig
from trainer.config import TrainerConfig
from trainer.state import TrainState

# Settings of the data that change neither which tokens come nor in which order.
FREE_DATA = frozenset(f"data.{name}" for name in (*GIVEN_NOW, "workers"))
PACKING = frozenset(f"data.{name}" for name in ("pack_length", "holdout", "window_documents"))


def misfits(old: RunConfig, new: RunConfig, checkpoint: Path) -> list[str]:
    """Why a run of `new` cannot begin with `checkpoint`, which one of `old` wrote; each with what
    to do. Empty when it can."""
    state = TrainState.read(checkpoint)
    found = []
    if new.seed != old.seed or new.train.packs_per_step != old.train.packs_per_step:
        for name, then, now in (
            ("seed", old.seed, new.seed),
            ("train.packs_per_step", old.train.packs_per_step, new.train.packs_per_step),
        ):
            if now != then:
                found.append(f"{name}: {then} -> {now} would change the order of samples; keep it")
    data = freeze.differences(old.data, new.data, path="data", skip=FREE_DATA)
    for change in data:
        if change.partition(":")[0] in PACKING:
            found.append(f"{change} would pack the documents otherwise; keep it")
        elif not new.data.accept_changed:
            found.append(
                f"{change}: other documents; keep them, or add data.accept_changed=true: pack "
                f"{state.cursor:,} of the new ones then comes next"
            )
    found += _model_misfits(old, new)
    if new.optim.name != old.optim.name:
        found.append(
            f"optim.name: {old.optim.name} -> {new.optim.name} keeps other figures of each "
            "parameter; keep it"
        )
    if new.model.engram.store != "mapped" and new.optim.table_rule != old.optim.table_rule:
        found.append(
            f"optim.tables: {old.optim.table_rule} -> {new.optim.table_rule} keeps other figures "
            "of each row; keep it"
        )
    if new.checkpoint.strict and state.mesh != new.parallel.sizes():
        found.append("checkpoint.strict=true refuses another mesh; set checkpoint.strict=false")
    if new.train.steps <= state.step:
        found.append(
            f"train.steps={new.train.steps}, and {checkpoint.name} has done {state.step:,}; "
            f"give more, for example train.steps={2 * state.step}"
        )
    return found


def _model_misfits(old: RunConfig, new: RunConfig) -> list[str]:
    skip = frozenset({"model.weights"})  # read only by a run that begins without a checkpoint
    changes = freeze.differences(old.model, new.model, path="model", skip=skip)
    changes += freeze.differences(old.indexer, new.indexer, path="indexer")
    if not changes:
        return []
    then = _tensors(old)
    now = _tensors(replace(new, optim=old.optim))
    different = sorted(n for n in then.keys() | now.keys() if then.get(n) != now.get(n))
    if not different:
        return []
    listed = ", ".join(different[:3]) + (", …" if len(different) > 3 else "")
    return [
        f"{'; '.join(changes)}: {len(different)} of {len(then)} tensors would have another shape, "
        f"or come or go ({listed}); keep it, or export the model and give it as model.weights"
    ]


def _tensors(config: TrainerConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a checkpoint holds, but for the state of the tables' optimiser."""
    from model.empty import without_memory
    from model.names import table_name
    from model.transformer import DeepseekV41
    from trainer.optim import build_optimizer, optimizer_tensors

    model = config.model
    with without_memory():
        built = DeepseekV41(model, distill=config.indexer.distills(model))
    optimizer = build_optimizer(built, config.optim, model)
    found = {f"model/{name}": tuple(t.shape) for name, t in built.state_dict().items()}
    for name, tensor in optimizer_tensors(optimizer).items():
        found[f"optimizer/{name}"] = tuple(tensor.shape)
    if model.engram.store != "mapped":
        rows = model.engram_num_embeddings
        for layer, count in zip(model.engram_layers, rows, strict=False):
            found[f"tables/{table_name(layer)}"] = (count, model.engram_head_dim)
    return found
