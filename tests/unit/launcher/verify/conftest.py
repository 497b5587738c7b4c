"""Reference cases, whole and spoilt, and the command that judges them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from launcher.verify import command

GOLDEN = Path(__file__).parents[3] / "golden"

Spoil = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def golden() -> Path:
    """The folder of reference cases."""
    return GOLDEN


@pytest.fixture
def spoilt(tmp_path: Path) -> Callable[[str, str, Spoil], Path]:
    """spoilt(case, file, change): a copy of a case after `change(tensors of file)`."""

    def make(case: str, file: str, change: Spoil) -> Path:
        folder = tmp_path / case
        shutil.copytree(GOLDEN / case, folder)
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)
        return folder

    return make


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """verify(*arguments) -> (exit code, printed lines)."""

    def call(*arguments: object) -> tuple[int, list[str]]:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        code = command.run(parser.parse_args([str(a) for a in arguments]))
        return code, capsys.readouterr().out.splitlines()

    return call


@pytest.fixture
def verify_json(
    verify: Callable[..., tuple[int, list[str]]],
) -> Callable[..., dict]:
    """verify_json(*arguments) -> the printed object."""

    def call(*arguments: object) -> dict:
        _, lines = verify("--json", *arguments)
        assert len(lines) == 1
        return json.loads(lines[0])

    return call
