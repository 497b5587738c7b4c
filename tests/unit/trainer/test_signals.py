import os
import signal
import subprocess
import sys
import threading

import pytest

from trainer.exit_codes import ExitCode
from trainer.signals import StopSignals


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
