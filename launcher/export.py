"""`dsv41 export RUN --to DIR`: a run's model as a folder of safetensors, whole or not at all."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import freeze
from launcher.failures import Terminated, terminable
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from launcher.runs.names import add_run, named
from trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from model.released.encode import Tally
    from model.released.export import Format, Plan, Table
    from model.released.files import WeightsFolder

PATIENCE = 5.0  # seconds between two lines of progress
SLACK = 64 << 20  # bytes beside the tensors: headers, index, tokenizer
NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the model of a run's newest whole checkpoint, or of the one given, as a folder of "
        "sharded safetensors with config.json and the tokenizer. The folder appears when it is "
        "complete."
    )
    add_run(parser, other="one of a run's checkpoints")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--format",
        choices=("plain", "released"),
        required=True,
        help="plain: every value as it is; released: FP8 and FP4 as the released files have them",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of a plain copy; parts that train in fp32 stay fp32 (default: the model's dtype)",
    )
    parser.add_argument(
        "--like",
        metavar="DIR",
        help="the weights that the run started from, if they have moved: weights that are still "
        f"theirs keep their bytes, and the draft is copied; {NONE} does without them",
    )
    parser.add_argument(
        "--shard-gb", type=float, default=10.0, metavar="GB", help="size of a file at most"
    )


def run(args: argparse.Namespace) -> int:
    """Export and return the exit code."""
    try:
        with terminable():
            _run(args)
    except Stop as stop:
        print(f"dsv41 export: {stop.message}", file=sys.stderr)
        return stop.code
    except Terminated:
        return ExitCode.AGAIN
    return ExitCode.DONE


def _run(args: argparse.Namespace) -> None:
    from data.errors import DataError
    from model.released.errors import WeightsError
    from trainer.checkpoint.errors import DamagedCheckpointsError
    from trainer.disk import DiskError

    if args.dtype and args.format != "plain":
        raise Stop(ExitCode.USAGE, "--dtype is of a plain copy; add --format plain, or drop it")
    if not args.shard_gb > 0:
        raise Stop(ExitCode.USAGE, f"--shard-gb={args.shard_gb} must be above 0")
    if os.path.lexists(args.to):
        raise Stop(ExitCode.CANNOT_CREATE, f"{args.to} exists already; name a new folder")
    try:
        _export(args)
    except (DataError, WeightsError) as error:
        raise Stop(ExitCode.BAD_DATA, str(error)) from error
    except DamagedCheckpointsError as error:
        raise Stop(ExitCode.IO_ERROR, str(error)) from error
    except DiskError as error:
        raise Stop(
            ExitCode.IO_ERROR if error.full else ExitCode.CANNOT_CREATE, str(error)
        ) from error
    except ValueError as error:
        raise Stop(ExitCode.CONFIG, str(error)) from error


def _export(args: argparse.Namespace) -> None:
    from model.released.export import plan_export, write_export
    from trainer.saved import SavedModel

    run, checkpoint = _checkpoint(args.run, args.runs_dir)
    config = freeze.load(run.config_file)
    format: Format = "released" if args.format == "released" else args.dtype or config.model.dtype
    source = _source(args, config)
    draft = _takes_draft(config, source) if format == "released" else False
    tables = _mapped_tables(config, checkpoint)
    model = SavedModel(checkpoint, config.model)
    plan = plan_export(
        model.shapes,
        tables,
        format=format,
        source=source,
        draft=draft,
        largest=int(args.shard_gb * 10**9),
    )
    _check_space(args.to, plan.size + SLACK)
    with _new_folder(args.to) as folder:
        tally = write_export(plan, model, tables, to=folder, progress=_progress(args.to))
        for name, content in _documents(config, plan, format).items():
            (folder / name).write_bytes(content)
    print(_report(args, checkpoint, plan, tally))


def _checkpoint(text: str, runs_dir: Path) -> tuple[RunFolder, Path]:
    """The run, and its newest whole checkpoint or the one that `text` names."""
    from trainer.checkpoint.errors import DamagedCheckpointsError
    from trainer.checkpoint.folders import newest_whole
    from trainer.checkpoint.manifest import damage

    path = Path(text)
    if path.parent.name == "checkpoints" and path.is_dir():
        run = named(str(path.parent.parent), runs_dir)
        if found := damage(path):
            raise DamagedCheckpointsError("\n".join(found))
        return run, path
    run = named(text, runs_dir, other="a checkpoint")
    newest = newest_whole(run.path / "checkpoints")
    if newest is None:
        raise Stop(
            ExitCode.CONFIG,
            f"{run.path} has no checkpoint yet; wait for its first, or stop it: dsv41 stop",
        )
    return run, newest


def _source(args: argparse.Namespace, config: RunConfig) -> WeightsFolder | None:
    """The weights that the run started from; None when there are none."""
    from model.released.audit import audit, unread_by
    from model.released.check import model_shapes
    from model.released.errors import WeightsError
    from model.released.files import open_folder

    given = args.like or config.model.weights
    if not given or given == NONE:
        return None
    if not args.like and not Path(given).is_dir():
        raise Stop(
            ExitCode.CONFIG,
            f"The weights that this run started from are no longer in {given}. Say where they are "
            f"(--like DIR), or do without them: --like {NONE} quantises everything anew and leaves "
            "the draft out.",
        )
    folder = open_folder(Path(given).expanduser())
    shapes = model_shapes(config.model, tables=False)
    if found := audit(folder, shapes, unread=unread_by(config.model, tables=False)):
        raise WeightsError(folder.path, found)
    return folder


def _takes_draft(config: RunConfig, source: WeightsFolder | None) -> bool:
    """Whether the source has a draft for a model of this depth."""
    from model.released.check import CONFIG
    from model.released.export import DRAFT

    if source is None or not any(name.startswith(DRAFT) for name in source.tensors):
        return False
    document = source.json(CONFIG) or {}
    layers = document.get("text_config", {}).get("num_hidden_layers")
    return layers == config.model.num_hidden_layers


def _mapped_tables(config: RunConfig, checkpoint: Path) -> dict[str, Table]:
    """The tables that the run reads out of files, once they are known to be the same."""
    from model.engram.mapped import MappedStore
    from model.released.tables import store_tables
    from trainer.state import TrainState

    if config.model.engram.store != "mapped" or not config.model.engram_layers:
        return {}
    # In fp32: what a table holds, not what a narrower model makes of it.
    store = MappedStore(replace(config.model, dtype="float32"), token_map=None)
    TrainState.read(checkpoint).require_same_tables(store.fingerprint(), folder=checkpoint)
    return store_tables(store, config.model)


def _documents(config: RunConfig, plan: Plan, format: Format) -> dict[str, bytes]:
    from tokenizers import Tokenizer

    from data.tokenizer import tokenizer_file
    from model.released.check import CONFIG
    from model.released.documents import config_text, tokenizer_files

    source = plan.source.path if plan.source is not None else None
    text = config_text(
        config.model,
        source=source,
        dtype="bfloat16" if format == "released" else format,
        quantised=format == "released",
        draft=plan.draft,
    )
    tokenizer = Tokenizer.from_file(str(tokenizer_file(config.data.tokenizer)))
    names = ("bos_token", "eos_token", "pad_token")
    spelled = {n: tokenizer.id_to_token(getattr(config.model, f"{n}_id")) for n in names}
    tokens = {name: token for name, token in spelled.items() if token is not None}
    files = tokenizer_files(
        source,
        tokenizer=tokenizer_file(config.data.tokenizer),
        tokens=tokens,
        max_length=config.model.max_position_embeddings,
    )
    return {CONFIG: text.encode(), **files}


def _check_space(to: Path, needed: int) -> None:
    from trainer.disk import DiskError, describe_disk, megabytes, nearest_existing

    if needed > shutil.disk_usage(nearest_existing(to.absolute())).free:
        raise DiskError(
            f"This needs {megabytes(needed)}, but {describe_disk(to.absolute())}. Free space "
            "there, or choose another place with --to.",
            full=True,
        )


@contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """A temporary folder that becomes `to` when all went well, and else is gone."""
    from trainer.disk import disk_error, sync_folder

    to = to.absolute()
    temporary = to.with_name(f".{to.name}.{secrets.token_hex(4)}")
    made = [parent for parent in to.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(temporary)
        if os.path.lexists(to):  # rename would silently replace an empty folder
            raise Stop(ExitCode.CANNOT_CREATE, f"{to} exists already; name a new folder")
        temporary.rename(to)
        sync_folder(to.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            raise disk_error(error, doing=f"writing {to}", path=to) from error
        raise


def _progress(to: Path) -> Callable[[int, int], None]:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PATIENCE:
            last = time.monotonic()
            share = 100 * done / max(total, 1)
            print(f"writing {to}: {share:.0f} % of {total / 1e9:.1f} GB", file=sys.stderr)

    return report


def _report(args: argparse.Namespace, checkpoint: Path, plan: Plan, tally: Tally) -> str:
    count = sum(len(tensors) for tensors in plan.files.values())
    lines = [
        f"{args.to}: {checkpoint.name} as {count:,} tensors, {plan.size / 1e6:,.1f} MB in "
        f"{len(plan.files)} file(s)"
    ]
    if tally.blocks:
        changed = tally.blocks - tally.kept
        lines.append(
            f"quantised: {tally.kept:,} of {tally.blocks:,} blocks keep the bytes of the source; "
            f"rounding the other {changed:,} moved the weights by {100 * tally.error:.2f} %"
        )
    if plan.draft:
        lines.append("draft: copied from the source")
    return "\n".join(lines)
