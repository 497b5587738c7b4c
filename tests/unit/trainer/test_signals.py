import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer.exit_codes import ExitCode
from trainer.signals import GRACE, StopSignals, request_stop, time_given


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.AGAIN)],
)
def test_the_first_signal_is_only_noted(number, code):
    with StopSignals() as stop:
        assert stop.exit_code is None
        os.kill(os.getpid(), number)
        assert stop.exit_code == code


def test_the_first_signal_says_what_will_happen(capfd):
    with StopSignals(notice="stopping"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == "stopping\n"


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_at_once(number):
    script = (
        "import os, time\n"
        "from trainer.signals import StopSignals\n"
        "with StopSignals():\n"
        f"    os.kill(os.getpid(), {signal.SIGTERM.value})\n"
        "    print('still here', flush=True)\n"
        f"    os.kill(os.getpid(), {number.value})\n"
        "    time.sleep(30)\n"
        "print('never')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == -number
    assert done.stdout == "still here\n"


def test_other_threads_may_enter_it():
    codes = []

    def work():
        with StopSignals() as stop:
            codes.append(stop.exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [None]


@pytest.mark.parametrize(
    ("number", "left"),
    [(signal.SIGTERM, 30), (signal.SIGUSR2, 30), (signal.SIGINT, math.inf)],
)
def test_only_a_cluster_has_a_deadline(monkeypatch, number, left):
    monkeypatch.setenv(GRACE, "30")
    with StopSignals() as stop:
        assert stop.seconds_left == math.inf
        os.kill(os.getpid(), number)
        assert stop.exit_code is not None
        assert stop.seconds_left == pytest.approx(left, abs=5)


def test_the_signals_of_a_cluster_may_come_twice(monkeypatch):
    monkeypatch.setenv(GRACE, "30")
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        first = stop.seconds_left
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.exit_code == ExitCode.AGAIN
        assert stop.seconds_left < first


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ({}, math.inf),  # dsv41 stop, Ctrl-C
        ({"until": 20.0}, 20),  # a supervisor that was told to end, so many seconds from now
        ({"now": True}, 0),
    ],
)
def test_a_stop_file_tells_how_long_there_is(tmp_path, monkeypatch, said, left):
    monkeypatch.setenv(GRACE, "60")
    file = tmp_path / "stop"
    if "until" in said:
        said = {"until": time.time() + said["until"]}
    assert time_given(file) == math.inf
    request_stop(file, ExitCode.AGAIN, why="x", **said)
    with StopSignals(file=file) as stop:
        assert stop.exit_code == ExitCode.AGAIN
        assert stop.seconds_left == pytest.approx(left, abs=5)


def test_a_torn_stop_file_is_no_deadline(tmp_path):
    (tmp_path / "stop").write_text("{")
    assert time_given(tmp_path / "stop") == math.inf
