"""Two ranks, of which one has images and the other text alone: they finish, and equal one rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASE = Path(__file__).parents[1] / "golden" / "tiny_image"
PROGRAM = Path(__file__).with_name("image_rank_program.py")


def start(out: Path, world: int) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(CASE), str(out)],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.mark.slow
def test_a_rank_without_images_runs_the_tower_too(tmp_path: Path) -> None:
    files = {world: tmp_path / f"{world}.pt" for world in (1, 2)}
    started = [process for world, out in files.items() for process in start(out, world)]
    try:
        output = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], "\n".join(output)
    one, two = (torch.load(out) for out in files.values())
    assert one.keys() == two.keys()
    seen = [name for name in one if name.startswith(("vision.", "aligner.", "image_"))]
    assert len(seen) > 20
    assert all(one[name].any() for name in seen)
    for name, grad in one.items():
        error = (two[name] - grad).norm() / grad.norm().clamp_min(1e-30)
        assert error < 1e-4, name
