"""A reference case on disk: a folder with case.json and the tensors its kind needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.exit_codes import ExitCode

LINES_SHOWN = 4


class CaseError(Exception):
    """A case that cannot be read: one line that names the file, and the exit code it deserves."""

    def __init__(self, message: str, code: ExitCode = ExitCode.BAD_DATA) -> None:
        lines = [line.strip() for line in message.splitlines()]
        more = f"; and {len(lines) - LINES_SHOWN} more" if len(lines) > LINES_SHOWN else ""
        super().__init__("; ".join(lines[:LINES_SHOWN]) + more)
        self.code = code


class Unsupported(Exception):
    """A sound case that asks for something this version does not compute; the text says what."""


@dataclass(frozen=True)
class Case:
    """One case. `document` is its case.json; other files are read when asked for."""

    folder: Path
    kind: str
    document: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def entry(self, name: str) -> Any:
        """An entry of case.json; CaseError when it is missing."""
        if name not in self.document:
            raise CaseError(f'{self.folder / "case.json"} has no entry "{name}"')
        return self.document[name]

    def has(self, file: str) -> bool:
        return (self.folder / file).is_file()

    def json(self, file: str) -> dict[str, Any]:
        """The object in `file`; CaseError when it is missing or is not JSON."""
        return _read_json(self.folder / file)

    def tensors(self, file: str) -> Tensors:
        """The tensors in `file`; CaseError when it is missing or corrupt."""
        path = self.folder / file
        try:
            return Tensors(path, load_file(path))
        except FileNotFoundError:
            raise CaseError(f"{path} is missing") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise CaseError(f"{path} is no readable safetensors file: {error}") from None


class Tensors(dict[str, Tensor]):
    """The tensors of one file by name; a name that is not there is the file's fault."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.path = path

    def __missing__(self, name: str) -> Tensor:
        raise CaseError(f"{self.path} holds no tensor {name!r}")


def open_case(folder: Path) -> Case:
    """Read a folder's case.json.

    CaseError with the code for a wrong command line when this is no case at all, and with the code
    for bad data when its case.json cannot be used.
    """
    if not (folder / "case.json").is_file():
        what = "has no case.json" if folder.is_dir() else "is no folder"
        raise CaseError(f"{folder} {what}: name folders of reference cases", ExitCode.USAGE)
    document = _read_json(folder / "case.json")
    kind = document.get("kind")
    if not isinstance(kind, str):
        raise CaseError(f'{folder / "case.json"} names no "kind"')
    return Case(folder, kind, document)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CaseError(f"{path} is missing") from None
    except (ValueError, OSError) as error:
        raise CaseError(f"{path} is no readable JSON file: {error}") from None
    if not isinstance(found, dict):
        raise CaseError(f"{path} holds no JSON object")
    return found
