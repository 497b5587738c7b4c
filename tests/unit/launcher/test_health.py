"""A machine that cannot do its part is named before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher import health
from launcher.health import require_healthy_node
from launcher.problems import Stop
from launcher.run_config import RunConfig
from trainer.exit_codes import ExitCode


def test_a_missing_accelerator(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    slurm = replace(tiny.launcher.slurm, gpus_per_node=8)
    config = replace(tiny, launcher=replace(tiny.launcher, kind="slurm", slurm=slurm))
    with pytest.raises(Stop) as raised:
        require_healthy_node(config, local_rank=5)
    assert raised.value.code == ExitCode.CONFIG
    assert "rank 5 of it sees 3 accelerator(s)" in raised.value.message
    assert health.socket.gethostname() in raised.value.message


def test_no_room_for_batches(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    require_healthy_node(tiny, local_rank=0)
    monkeypatch.setattr(health, "LEAST_SHARED", 1 << 62)
    require_healthy_node(tiny, local_rank=0)  # without workers
    with pytest.raises(Stop, match="loader workers"):
        require_healthy_node(replace(tiny, data=replace(tiny.data, workers=2)), local_rank=0)
