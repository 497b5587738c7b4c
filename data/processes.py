"""Processes of our own: they outlive no parent, and leave signals to it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, parent_process, resource_tracker

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes inside: a signal that stops a run goes to the whole process group, and they
    must survive it from their first instruction on, so that their parent decides.

    They inherit the blocked mask; our own pending signals arrive when it is lifted.
    """
    # The tracker first, because starting it unblocks these signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_up_child() -> None:
    """To be called first in a child: ignore stop signals, and end when the parent is gone."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
