"""A run whose output nobody reads any more goes on to its end."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import Place


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="in the command's process", marks=pytest.mark.slow),
        pytest.param(("launcher=torchrun",), id="under a supervisor", marks=pytest.mark.long),
    ],
)
def test_a_reader_that_goes_away_ends_nothing(place: Place, words: tuple[str, ...]) -> None:
    process = place.begin(*place.small, *words)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=240) == 0
    (run,) = place.runs()
    assert list(place.losses(run)) == [1, 2, 3]
    assert "step 3/3" in (run / "attempts/001/rank-00000.log").read_text()
