"""What a call needs of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that a call holds at a time beyond what there was, by torch's CPU allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call()
    assert trace.profiler is not None
    held = most = 0
    results: Any = trace.profiler.kineto_results
    for event in sorted(results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
