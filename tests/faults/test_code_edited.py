"""A checkout that is worked on while a run that was submitted from it goes on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from launcher.own_packages import HOME, NAMES
from tests.faults.conftest import Rehearsal

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]


@pytest.mark.long
def test_code_edited_after_submission(rehearsal: Rehearsal, tmp_path: Path) -> None:
    for name in NAMES:
        shutil.copytree(HOME / name, tmp_path / name)
    running = rehearsal.start("slow@forward,attempt=1,step=5,ms=4000", home=tmp_path)
    running.until(lambda: "step 4/8" in running.log(0))
    for file in tmp_path.rglob("*.py"):
        file.write_text("raise RuntimeError('edited')\n")
    os.kill(running.beat(1)["pid"], signal.SIGKILL)
    ended = running.end()
    ended.said("from the checkpoint of step 3 (failure 1 of 3 allowed)")
    ended.is_like_the_uninterrupted_one()
    assert "edited" not in ended.text
