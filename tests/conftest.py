"""For all tests: prepared data goes to a cache of the test run, which its processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that stands for the user's cache folder."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        plots = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
        if "MPLCONFIGDIR" not in os.environ:  # its list of fonts takes seconds to make
            patch.setenv("MPLCONFIGDIR", str(plots))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
