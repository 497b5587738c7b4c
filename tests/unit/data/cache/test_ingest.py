"""A streaming source: its first window is enough to begin, and whatever ends the rest is told."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.cache import ingest
from data.cache.lock import held, lock_file
from data.cache.prepare import prepare
from data.errors import DataError, WorkerDiedError

LINE = {"text": "the cat sat on the mat and then it ran away from the dog " * 40}
MANY = 1100  # 2.6 MB, some seconds


@pytest.fixture
def streamed(make_data, tmp_path, write_jsonl):
    """streamed(lines): the configuration of a streaming source, 100 documents a window."""

    def make(written):
        return make_data(
            source="jsonl",
            paths=(str(write_jsonl(*written)),),
            streaming=True,
            cache_dir=str(tmp_path / "cache"),
            window_documents=100,
            processes=1,
        )

    yield make
    ingest.stop_all()


def wait_until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def writer(folder: Path) -> int:
    """The process that holds the lock."""
    return json.loads(lock_file(folder).read_text())["pid"]


def test_windows_arrive_while_the_first_is_used(streamed, model):
    data = streamed([LINE] * MANY)
    (source,) = prepare(data, model)
    growing = source.set
    assert not growing.complete
    assert growing.windows >= 1
    assert growing.documents(0) == 100
    growing.require_growing()
    (again,) = prepare(data, model)  # joins the process that is at work
    assert again.set == growing
    assert len(ingest._running) == 1
    wait_until(lambda: growing.complete)
    growing.require_growing()
    assert growing.windows == MANY // 100


def test_a_killed_process_is_told_and_replaced(streamed, model):
    data = streamed([LINE] * MANY)
    growing = prepare(data, model)[0].set
    os.kill(writer(growing.folder), signal.SIGKILL)
    wait_until(lambda: not held(lock_file(growing.folder)))
    with pytest.raises(WorkerDiedError, match="goes on from there"):
        growing.require_growing()
    ingest.stop_all()
    before = growing.windows
    prepare(data, model)
    wait_until(lambda: growing.complete)
    assert before < growing.windows == MANY // 100


def test_stopping_keeps_what_is_done(streamed, model):
    growing = prepare(streamed([LINE] * MANY), model)[0].set
    ingest.stop_all()
    assert not held(lock_file(growing.folder))
    assert growing.windows >= 1
    assert not growing.complete
    assert (growing.folder / "progress.json").is_file()


def test_a_bad_line_far_behind_ends_it_with_its_own_words(streamed, model):
    growing = prepare(streamed([LINE] * MANY + ["{"]), model)[0].set
    wait_until(lambda: not held(lock_file(growing.folder)))
    with pytest.raises(DataError, match=rf"corpus\.jsonl:{MANY + 1}: not JSON"):
        growing.require_growing()
    assert growing.windows >= 1


def test_a_bad_first_line_ends_it_at_once(streamed, model):
    with pytest.raises(DataError, match=r"corpus\.jsonl:1: not JSON"):
        prepare(streamed(["{"]), model)


OWNER = """
import pickle, signal, sys, time
from data.cache.prepare import prepare
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored around the tests
    prepare(*pickle.load(open(sys.argv[1], "rb")))
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_owner(streamed, model, tmp_path, number):
    data = streamed([LINE] * MANY)
    (tmp_path / "owner.py").write_text(OWNER)
    (tmp_path / "config").write_bytes(pickle.dumps((data, model)))
    owner = subprocess.Popen(
        [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "config")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ingest.HOME)},
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"begun\n"
        (folder,) = (p for p in data.cache_folder.iterdir() if p.is_dir())
        pid = writer(folder)
        os.killpg(owner.pid, number)  # as Ctrl-C on a terminal
        wait_until(lambda: not Path(f"/proc/{pid}").exists() or not held(lock_file(folder)), 20)
        owner.wait(30)
        assert not (folder / "complete.json").exists()
    finally:
        owner.kill()
        owner.communicate()
