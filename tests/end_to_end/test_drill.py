"""`dsv41 drill` as a user runs it."""

from __future__ import annotations

import pytest

from trainer.exit_codes import ExitCode

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.long
def test_a_setup_that_survives(place) -> None:
    words = (*place.small, "launcher=torchrun", "parallel.dp_shard=2", "--case", "error")
    ended = place.run("dsv41", "drill", *words, "--case", "corrupt")
    assert ended.code == ExitCode.DONE, ended.text
    table = ended.out.splitlines()[-2:]
    assert table[0].split()[0] == "error" and table[0].endswith("  ok")
    assert table[0].count("bug, on from step 3, then equal") == 2  # as was promised
    assert table[1].split()[0] == "corrupt" and table[1].endswith("  ok")
    assert place.runs() == []  # nothing is left of runs that went well


def test_a_setup_that_cannot_begin(place) -> None:
    ended = place.run("dsv41", "drill", "+experiment=tiny", "model=hugee")
    assert ended.code == ExitCode.CONFIG
    assert "hugee" in ended.err and "Traceback" not in ended.text
