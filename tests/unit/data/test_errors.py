"""Errors keep what they know on their way from another process."""

import pickle

import pytest

from data.errors import BrokenFileError, CacheError, DataError, WorkerDiedError


@pytest.mark.parametrize(
    "error",
    [
        DataError("a.txt:3: bad"),
        BrokenFileError("a.txt: cut", file=7),
        CacheError("no room", full=True),
        WorkerDiedError("killed"),
    ],
)
def test_pickled(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
