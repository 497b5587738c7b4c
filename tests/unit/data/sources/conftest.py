"""Sources opened as the preparation opens them, and walked to the end."""

import pytest

from data.sources.base import Finding, Record
from data.sources.opening import open_source


@pytest.fixture(scope="session")
def opened(make_data):
    def make(columns=("text",), optional=(), **settings):
        config = make_data(**settings)
        return open_source(config, name="data", columns=columns, optional=optional)

    return make


@pytest.fixture(scope="session")
def walked():
    def walk(source, position=None) -> list[Record | Finding]:
        """All records and findings from `position` on."""
        return [read for block in source.blocks(position) for read in source.read(block)]

    return walk


@pytest.fixture(scope="session")
def resumes_anywhere(walked):
    def check(source) -> int:
        """From every block's position the rest comes; returns the number of blocks."""
        whole = walked(source)
        blocks = list(source.blocks())
        seen = 0
        for block in blocks:
            seen += len(list(source.read(block)))
            assert walked(source, block.position) == whole[seen:]
        done = [block.done for block in blocks]
        assert done == sorted(done)
        if source.size is not None:
            assert done[-1] == source.size
        return len(blocks)

    return check
