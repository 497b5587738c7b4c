"""Preparing a run's data: by `dsv41 data prepare`, and by dsv41-train before it makes a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from data.cache.prepare import PreparedSource, prepare
from data.corpus import pack_sources
from data.errors import CacheError, DataError, WorkerDiedError
from data.packs import PackSource
from launcher.data_tools.view import SourceView
from launcher.problems import Stop
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode


def run(config: RunConfig) -> int:
    """Prepare and pack all of every source, streaming ones too, and say what there is."""
    began = time.monotonic()
    for source in prepared(config, whole=True):
        print(summary(source))
    print(f"{time.monotonic() - began:.1f} s")
    return ExitCode.DONE


def prepared(config: RunConfig, *, whole: bool = False) -> list[PreparedSource]:
    """The sources of a run, prepared if they are not yet, with progress for people, and packed.

    whole: streaming sources to their end, and every window's packs; otherwise those of the windows
    that a run begins with. Stop tells what is wrong: 65 for data, 73 or 74 for the cache, 75 when
    a process was killed.
    """
    data, model = config.data, config.model
    with SourceView("preparing") as view, told():
        made = prepare(data, model, whole=whole, progress=view, say=view.say)
        for number, source in enumerate(pack_sources(data, model, made, seed=config.seed)):
            if whole:
                _plan_all(source, view)
            else:
                source.plan_beginning(seed=config.seed, number=number)
        return made


def _plan_all(source: PackSource, view: SourceView) -> None:
    prepared = source.plans.prepared
    sizes = [4 * int(prepared.offsets(window)[-1]) for window in range(prepared.windows)]
    done = 0
    for window, size in enumerate(sizes):
        source.packs(window)
        done += size
        view(f"packs of {source.name}", done, sum(sizes))


@contextmanager
def told() -> Iterator[None]:
    """Errors of the preparation as Stop."""
    try:
        yield
    except DataError as error:
        raise Stop(ExitCode.BAD_DATA, str(error)) from error
    except CacheError as error:
        code = ExitCode.IO_ERROR if error.full else ExitCode.CANNOT_CREATE
        raise Stop(code, str(error)) from error
    except WorkerDiedError as error:
        raise Stop(ExitCode.AGAIN, str(error)) from error


def summary(source: PreparedSource) -> str:
    """Documents, tokens and place of one source."""
    made = source.set
    windows = range(made.windows)
    documents = sum(made.documents(w) for w in windows)
    tokens = sum(int(made.offsets(w)[-1]) for w in windows)
    dropped = f", {made.dropped:,} dropped as too long" if made.dropped else ""
    name = f"{source.name}: " if source.name else ""
    return f"{name}{documents:,} documents, {tokens:,} tokens{dropped}  {made.folder}"
