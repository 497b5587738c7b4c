"""Configurations composed from conf/, as the command line composes them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from launcher import help_text, hydra_launcher
from launcher.run_config import RunConfig
from launcher.runs import queue
from launcher.validate import validate

Composed = Callable[..., DictConfig]
Commands = Callable[[str, str], None]
Answering = Callable[[bytes | None], AbstractContextManager[str]]
GOLDEN_TOKENIZER = Path(__file__).parents[2] / "golden" / "tokenizer.json"


@pytest.fixture
def composed() -> Iterator[Composed]:
    """composed("a=1", "b=2"): the configuration that these overrides give."""
    OmegaConf.register_new_resolver("dsv41_help", help_text.render, replace=True)
    hydra_launcher.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        yield lambda *overrides: compose("config", overrides=list(overrides))


@pytest.fixture
def tiny(composed: Composed, tmp_path: Path) -> RunConfig:
    """The run of +experiment=tiny, below tmp_path."""
    return validate(composed("+experiment=tiny", f"runs_dir={tmp_path / 'runs'}"), environ={})


@pytest.fixture
def job(tiny: RunConfig) -> RunConfig:
    """The same, for Slurm."""
    return replace(tiny, launcher=replace(tiny.launcher, kind="slurm"))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """command("sbatch", "echo 17"): a command by a line of the shell; there are no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        monkeypatch.setattr(queue, "_answer", (0.0, None))  # what squeue said before

    return put


@pytest.fixture
def answering() -> Answering:
    """answering(b"no"): while entered, a server that says so to whoever connects, or nothing at all
    (None), at the address that it gives."""
    return _answering


@contextmanager
def _answering(reply: bytes | None) -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            held = []
            with suppress(OSError):  # closed below
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if reply is not None:
                        connection.recv(1024)
                        connection.sendall(reply)
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
