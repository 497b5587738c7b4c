import errno
import os
import signal

import pytest

from trainer import faults


@pytest.fixture
def arm():
    yield faults.arm
    faults.arm("")


def test_nothing_happens_unless_asked_for(arm):
    faults.reach("save.slice", step=1, rank=0)
    arm("raise@save.rename")
    faults.reach("save.slice", step=1, rank=0)
    with pytest.raises(faults.FaultError):
        faults.reach("save.rename")


def test_conditions_and_visits(arm):
    arm("raise@save.slice,step=4,rank=1,visit=2; raise@save.rename,step=6")
    for known in ({"step": 3, "rank": 1}, {"step": 4, "rank": 0}, {"step": 4}):
        for _ in range(3):
            faults.reach("save.slice", **known)
    faults.reach("save.slice", step=4, rank=1)  # the first of its visits
    with pytest.raises(faults.FaultError):
        faults.reach("save.slice", step=4, rank=1)
    faults.reach("save.slice", step=4, rank=1)
    with pytest.raises(faults.FaultError):
        faults.reach("save.rename", step=6, rank=0)


def test_a_full_disk_is_the_real_error(arm):
    arm("disk-full@save.slice")
    with pytest.raises(OSError, match="space") as error:
        faults.reach("save.slice")
    assert error.value.errno == errno.ENOSPC


def test_a_killed_process_has_no_last_word(arm):
    arm("kill@save.rename")
    child = os.fork()
    if child == 0:
        try:
            faults.reach("save.rename")
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("burn@save.slice", "'burn' is none of kill"),
        ("kill@save.slices", r"'save\.slices' is none of save\.folder"),
        ("kill", "'' is none of save"),
        ("kill@save.slice,step", "'step' is not NAME=NUMBER"),
        ("kill@save.slice,step=two", "'step=two' is not NAME=NUMBER"),
    ],
)
def test_what_would_never_happen_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        faults.parse(text)
