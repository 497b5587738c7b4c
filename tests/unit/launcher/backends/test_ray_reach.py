"""Whether the head of a Ray cluster is at an address."""

from __future__ import annotations

import time

import pytest

from launcher.backends.ray.config import host_and_port
from launcher.backends.ray.reach import no_head

SECONDS = 0.5


def problem(address: str) -> str:
    place = host_and_port(address)
    assert place is not None
    return no_head(*place, seconds=SECONDS)


# What the head of Ray 2.60 sends: four settings, a window, and that it has seen ours.
HEAD = bytes.fromhex(
    "000018040000000000000400400000000500400000000600004000fe0300000001"
    "000004080000000000003f0001"
    "000000040100000000"
)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        pytest.param(HEAD, "", id="a head"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "something else than Ray", id="web"),
        pytest.param(b"", "something else than Ray", id="hangs up"),
        pytest.param(b"\0\0", "something else than Ray", id="too short"),
        pytest.param(None, "no answer in", id="silent"),
    ],
)
def test_only_what_speaks_as_a_head_is_taken_for_one(answering, reply, told) -> None:
    began = time.monotonic()
    with answering(reply) as address:
        found = problem(address)
    assert told in found and bool(told) == bool(found)
    assert time.monotonic() - began < SECONDS + 5


def test_nobody_there(answering) -> None:
    with answering(b"") as address:
        pass
    assert "refused" in problem(address)
    assert problem("no.such.host.invalid:6379")
