"""Sources to prepared sets: tokenised once, found in the cache ever after."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from data.cache.durable import write_json
from data.cache.lock import lock_file, locked
from data.cache.parallel import outcomes, usable_cores
from data.cache.prepared import COMPLETE, FAILED, PreparedSet, origin_text
from data.cache.recipe import Recipe, read_recipe
from data.cache.room import RoomCheck
from data.cache.writer import SetWriter
from data.errors import CacheError, DataError, WorkerDiedError
from data.sources.base import Finding
from data.sources.files import MOST_LISTED

if TYPE_CHECKING:
    from data.config import DataConfig
    from model.config import ModelConfig

Say = Callable[[str], None]

SILENT_SECONDS = 5.0


class Progress(Protocol):
    """Told how far a source is: bytes read of all, None when nobody knows how many there are."""

    def __call__(self, source: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True)
class PreparedSource:
    """One source of a run, prepared. name: the mixture's name for it, "" for an only source.
    weight, epochs: as in MixtureSource."""

    name: str
    weight: float
    epochs: int | None
    set: PreparedSet

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for other processes."""
        return {**vars(self), "set": str(self.set.folder)}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> PreparedSource:
        """The inverse of to_dict. DataError when the set is not there."""
        return cls(**{**given, "set": PreparedSet.open(Path(given["set"]))})


def recipes(data: DataConfig, model: ModelConfig, *, say: Say = print) -> list[Recipe]:
    """What is to be prepared, in the configuration's order.

    DataError with what is wrong with each of the sources, as `read_recipe` has it.
    """
    found, wrong = [], []
    for name, source in data.named_sources():
        with _said_if_long(f"Looking at the files of {name}.", say):
            try:
                recipe = read_recipe(
                    source,
                    model,
                    name=name,
                    tokenizer=data.tokenizer,
                    window_documents=data.window_documents,
                )
            except DataError as error:
                wrong.append(str(error))
            else:
                found.append(recipe)
    if wrong:
        raise DataError("\n".join(wrong))
    return found


def prepare(
    data: DataConfig,
    model: ModelConfig,
    *,
    whole: bool = False,
    progress: Progress | None = None,
    say: Say = print,
) -> list[PreparedSource]:
    """Prepare every source of `data` that is not in the cache yet.

    Of a streaming source only the first window is waited for, unless `whole`; a process of its
    own prepares the others. DataError for a source that cannot be used, naming file and line;
    CacheError when the cache cannot be written; WorkerDiedError when a process was killed.
    """
    from data.cache.ingest import open_growing

    cache, processes = data.cache_folder, data.processes or usable_cores()
    sets = []
    for recipe in recipes(data, model, say=say):
        if recipe.streaming and not whole:
            made = open_growing(recipe, cache, processes=processes, say=say)
        else:
            made = prepare_set(recipe, cache, processes=processes, progress=progress, say=say)
        sets.append(made)
    if data.source != "mixture":
        return [PreparedSource("", 1.0, None, sets[0])]
    named = zip(data.mixture.items(), sets, strict=True)
    return [PreparedSource(name, s.weight, s.epochs, made) for (name, s), made in named]


def prepare_set(
    recipe: Recipe,
    cache: Path,
    *,
    processes: int,
    progress: Progress | None = None,
    say: Say = print,
    keep_failed: bool = False,
) -> PreparedSet:
    """The set of `recipe` below `cache`: found there, finished there, or made anew.

    keep_failed: leave the finished windows of a source that turns out to be bad, since somebody
    may be training on them; else nothing is left of it.
    """
    folder = cache / recipe.folder_name
    if (folder / COMPLETE).is_file():
        return PreparedSet.open(folder)
    room = RoomCheck(folder, total=recipe.pipeline.source.size)
    with ExitStack() as stack:
        with room.watched():
            cache.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock_file(folder), say=say))
        if (folder / COMPLETE).is_file():  # finished while we waited
            return PreparedSet.open(folder)
        try:
            with room.watched():
                (folder / FAILED).unlink(missing_ok=True)
            return _fill(recipe, folder, room, processes=processes, progress=progress)
        except (DataError, CacheError, WorkerDiedError) as error:
            if keep_failed:
                _leave_word(folder, error)
            elif isinstance(error, DataError):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _fill(
    recipe: Recipe, folder: Path, room: RoomCheck, *, processes: int, progress: Progress | None
) -> PreparedSet:
    pipeline, total = recipe.pipeline, recipe.pipeline.source.size
    with room.watched():
        writer = SetWriter(
            folder,
            header=recipe.header(),
            labelled=pipeline.kind.masked,
            window_documents=recipe.window_documents,
        )
    stream = outcomes(pipeline, position=writer.position, processes=processes)
    try:
        with closing(stream):
            for block, outcome in stream:
                if outcome.findings:
                    raise DataError(findings_text(recipe, outcome.findings))
                with room.watched():
                    writer.append(outcome.encoded, position=block.position, dropped=outcome.dropped)
                room.look(written=writer.written, done=block.done)
                if progress is not None:
                    progress(recipe.name, block.done, total)
        if writer.empty:
            raise DataError(_nothing(recipe, writer.dropped))
        with room.watched():
            return writer.complete()
    except CacheError:
        writer.discard_partial()
        raise
    except DataError:
        raise
    except BaseException:  # interrupted: what is done need not be done again
        with suppress(OSError):
            writer.sync()
        raise
    finally:
        writer.close()


@contextmanager
def _said_if_long(text: str, say: Say) -> Iterator[None]:
    """Say `text` when what is done inside takes more than some seconds."""
    timer = threading.Timer(SILENT_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave_word(folder: Path, error: Exception) -> None:
    """Tell those who wait for the rest of the set, while the lock is still held."""
    about = {"kind": type(error).__name__, "message": str(error)}
    with suppress(OSError):  # the disk may be full
        write_json(folder / FAILED, about | {"full": getattr(error, "full", False)})


def findings_text(recipe: Recipe, findings: Sequence[Finding]) -> str:
    """Up to ten of the findings, each with file and line."""
    lines = [finding_text(recipe, finding) for finding in findings[:MOST_LISTED]]
    if len(findings) == 1:
        return lines[0]
    more = len(findings) - len(lines)
    told = [f"  {line}" for line in lines] + ([f"  and {more:,} more nearby"] if more else [])
    return "\n".join(
        [
            f"{recipe.name}: documents that cannot be used:",
            *told,
            "Correct them; `dsv41 data check` with the same words as this command lists all.",
        ]
    )


def finding_text(recipe: Recipe, finding: Finding) -> str:
    """One finding, with file and line."""
    files = recipe.pipeline.source.files
    return f"{origin_text(files[finding.file], finding.place)}: {finding.problem}"


def _nothing(recipe: Recipe, dropped: int) -> str:
    if dropped:
        return (
            f"{recipe.name}: all {dropped:,} documents are longer than "
            f"{recipe.name}.max_document_length; raise it"
        )
    return f"{recipe.name} holds no document; correct {recipe.name}.paths"
