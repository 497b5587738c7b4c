"""Makes `import data` mean our `data`, whatever a user keeps in the current folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

NAMES = ("launcher", "trainer", "model", "data", "conf", "slurm")
HOME = Path(__file__).resolve().parent.parent


class _Siblings(MetaPathFinder):
    """Finds our packages beside this one, before any entry of sys.path is looked at."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in NAMES:
            return None
        folder = HOME / fullname
        return spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def claim() -> None:
    """Resolve our package names to the folders beside launcher/, in this process.

    A folder `data/` in the current directory or on PYTHONPATH is otherwise found first by
    `python -m`, or with PYTHONPATH set, and an editable install comes last of all.
    """
    if not any(isinstance(finder, _Siblings) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Siblings())


def strangers(home: Path) -> list[str]:
    """Those of our packages that are imported from outside `home`, each with where from."""
    found = []
    for name in NAMES:
        module = sys.modules.get(name)
        if module is None:
            continue
        origin = Path(next(iter(module.__path__)) if hasattr(module, "__path__") else "?")
        if origin.resolve() != (home / name).resolve():
            found.append(f"{name} from {origin}")
    return found
