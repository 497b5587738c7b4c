import errno
import os
import signal
import time

import pytest
import torch

from trainer import faults


@pytest.fixture
def arm():
    yield faults.arm
    faults.arm("")
    faults.place()


def test_nothing_happens_unless_asked_for(arm):
    faults.reach("save.slice", {"step": 1, "rank": 0})
    arm("raise@save.rename")
    faults.reach("save.slice", {"step": 1, "rank": 0})
    with pytest.raises(faults.FaultError):
        faults.reach("save.rename", {})


def test_conditions_and_visits(arm):
    arm("raise@save.slice,step=4,rank=1,visit=2; raise@save.rename,step=6")
    for known in ({"step": 3, "rank": 1}, {"step": 4, "rank": 0}, {"step": 4}):
        for _ in range(3):
            faults.reach("save.slice", known)
    faults.reach("save.slice", {"step": 4, "rank": 1})  # the first of its visits
    with pytest.raises(faults.FaultError):
        faults.reach("save.slice", {"step": 4, "rank": 1})
    faults.reach("save.slice", {"step": 4, "rank": 1})
    with pytest.raises(faults.FaultError):
        faults.reach("save.rename", {"step": 6, "rank": 0})


def test_a_full_disk_is_the_real_error(arm):
    arm("disk-full@save.slice")
    with pytest.raises(OSError, match="space") as error:
        faults.reach("save.slice", {})
    assert error.value.errno == errno.ENOSPC


def test_a_killed_process_has_no_last_word(arm):
    arm("kill@save.rename")
    child = os.fork()
    if child == 0:
        try:
            faults.reach("save.rename", {})
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("burn@save.slice", "'burn' is none of kill"),
        ("kill@save.slices", r"'save\.slices' is none of start, .*save\.folder"),
        ("kill", "'' is none of start"),
        ("kill@save.slice,step", "'step' is not NAME=NUMBER"),
        ("kill@save.slice,step=two", "'step=two' is not NAME=NUMBER"),
        ("nan@forward", "nan has nothing to act on there; use reduce"),
        ("corrupt@save", r"nothing to act on there; use save\.tensors, save\.renamed"),
    ],
)
def test_what_would_never_happen_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        faults.parse(text)


def test_what_a_process_knows_of_itself_counts_at_every_point(arm):
    arm("raise@data,rank=1,attempt=1")
    faults.reach("data", {"step": 1})
    faults.place(rank=1, attempt=2)
    faults.reach("data", {"step": 1})
    faults.place(rank=1, attempt=1)
    with pytest.raises(faults.FaultError):
        faults.reach("data", {"step": 1})


def test_a_gradient_becomes_nan(arm):
    arm("nan@reduce,step=2")
    grads = [None, torch.zeros(0), torch.zeros(2, 2), torch.zeros(2)]
    faults.reach("reduce", {"step": 1}, grads=iter(grads))
    assert not grads[2].isnan().any()
    faults.reach("reduce", {"step": 2}, grads=iter(grads))
    assert grads[2].isnan().sum() == 1 and not grads[3].isnan().any()


def test_one_bit_of_the_largest_file_is_flipped(arm, tmp_path):
    (tmp_path / "small").write_bytes(b"abc")
    (tmp_path / "large").write_bytes(bytes(100))
    arm("corrupt@save.renamed")
    faults.reach("save.renamed", {}, folder=tmp_path)
    content = (tmp_path / "large").read_bytes()
    assert len(content) == 100 and sum(byte.bit_count() for byte in content) == 1
    assert (tmp_path / "small").read_bytes() == b"abc"


def test_slow_goes_on_later(arm):
    arm("slow@forward,ms=120")
    began = time.monotonic()
    faults.reach("forward", {"step": 1})
    assert 0.12 <= time.monotonic() - began < 20


def test_a_stopped_process_goes_on_when_it_is_told_to(arm):
    arm("stop@backward")
    child = os.fork()
    if child == 0:
        faults.reach("backward", {})
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
