"""Weights & Biases itself, whose server is not there, does not answer, or refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.faults.conftest import Rehearsal

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]


class Refusing(BaseHTTPRequestHandler):
    """Nobody may do anything."""

    def do_POST(self) -> None:
        self.send_error(401)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def port(how: str) -> Iterator[int]:
    """Of a server that behaves so."""
    if how == "refuses":
        server = HTTPServer(("127.0.0.1", 0), Refusing)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
        server.server_close()
        return
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if how == "sleeps":
            held.listen()
        yield held.getsockname()[1]


@pytest.mark.long
@pytest.mark.parametrize("how", ["unreachable", "sleeps", "refuses"])
def test_without_weights_and_biases_a_run_is_the_same(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    logging = rehearsal.config.logging
    wandb = replace(logging.wandb, mode="online", init_timeout_s=40.0, finish_timeout_s=90.0)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with port(how) as number:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{number}")
        ended = rehearsal.run(logging=replace(logging, wandb=wandb))
    ended.is_like_the_uninterrupted_one(attempts=1)
    (told,) = [line for line in ended.text.splitlines() if "W&B:" in line]
    assert told.startswith("W&B: offline ("), told
    why, _, folder = told.partition("; to send it: wandb sync ")
    assert len(why) < 200
    (file,) = ended.run.path.glob("wandb/offline-run-*/run-*.wandb")
    assert str(file.parent) == folder
    assert b"eval_loss" in file.read_bytes()
    assert "Traceback" not in ended.text
