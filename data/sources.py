"""Where documents come from: Python's help topics, jsonl files, text files.

Whatever cannot be read stops the run with a DataError that names the file and the line: a line
skipped in silence would be data that the user believes was trained on.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.config import DataConfig
from data.errors import DataError


@dataclass(frozen=True)
class RawDocument:
    """One text. where: its place, for messages. done: bytes of the source read so far."""

    text: str
    where: str
    done: int


@dataclass(frozen=True)
class OpenSource:
    """The documents of a source, read as they are asked for; size: its bytes in all."""

    documents: Iterator[RawDocument]
    size: int


def open_source(config: DataConfig) -> OpenSource:
    """The documents that `config` names, always in the same order.

    Missing files raise DataError here, bad lines while iterating.
    """
    if config.source == "embedded":
        return _embedded()
    files = source_files(config)
    size = sum(path.stat().st_size for path in files)
    if config.source == "jsonl":
        return OpenSource(_jsonl(files, text_field=config.text_field), size)
    return OpenSource(_text(files), size)


def source_files(config: DataConfig) -> list[Path]:
    """Files of a jsonl or text source: paths in the given order, sorted inside a glob or folder.

    A folder gives its own *.jsonl or *.txt files. DataError for a path that matches no file.
    """
    suffix = "*.jsonl" if config.source == "jsonl" else "*.txt"
    found: list[Path] = []
    for given in config.paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = sorted(p for p in path.glob(suffix) if p.is_file())
            if not files:
                raise DataError(f"{path}: the folder holds no {suffix} file; correct data.paths")
        elif path.exists():
            files = [path]
        else:
            matches = glob.glob(str(path), recursive=True)
            files = sorted(p for p in map(Path, matches) if p.is_file())
            if not files:
                raise DataError(f"{path}: no such file, folder or match; correct data.paths")
        found += files
    return list(dict.fromkeys(found))


def _embedded() -> OpenSource:
    from pydoc_data.topics import topics

    texts = [(key, topics[key]) for key in sorted(topics)]

    def documents() -> Iterator[RawDocument]:
        done = 0
        for key, text in texts:
            done += len(text)
            yield RawDocument(text, f"pydoc_data.topics[{key!r}]", done)

    return OpenSource(documents(), sum(len(text) for _, text in texts))


def _text(files: list[Path]) -> Iterator[RawDocument]:
    done = 0
    for path in files:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error
        done += len(raw)
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{path}:{line}: not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error
        if not text.strip():
            raise DataError(f"{path}: the file is empty; remove it or give it text")
        yield RawDocument(text, str(path), done)


def _jsonl(files: list[Path], *, text_field: str) -> Iterator[RawDocument]:
    done = 0
    for path in files:
        number = 0
        try:
            with path.open("rb") as lines:
                for number, raw in enumerate(lines, start=1):
                    done += len(raw)
                    text = _line_text(raw, where=f"{path}:{number}", text_field=text_field)
                    yield RawDocument(text, f"{path}:{number}", done)
        except OSError as error:
            raise _unreadable(path, error) from error
        if number == 0:
            raise DataError(f"{path}: the file is empty; remove it or give it lines")


def _line_text(raw: bytes, *, where: str, text_field: str) -> str:
    try:
        line = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert the file to UTF-8"
        ) from error
    if not line.strip():
        raise DataError(f"{where}: the line is empty; remove it")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); write one JSON object a line") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: a JSON {type(value).__name__}, not an object; "
            f'write {{"{text_field}": "..."}}'
        )
    if text_field not in value:
        fields = ", ".join(map(repr, list(value)[:8])) or "none"
        raise DataError(
            f"{where}: no field {text_field!r} (fields here: {fields}); "
            "add it or set data.text_field"
        )
    text = value[text_field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {text_field!r} is a {type(text).__name__}, not a text; "
            "correct it or set data.text_field"
        )
    if not text.strip():
        raise DataError(f"{where}: field {text_field!r} is empty; remove the line")
    if b"\\u" in raw and not _encodes(text):
        raise DataError(
            f"{where}: field {text_field!r} holds half of a \\u surrogate pair, which is no "
            "character; correct the escape"
        )
    return text


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror or error}); check that it is there and readable"
    )
