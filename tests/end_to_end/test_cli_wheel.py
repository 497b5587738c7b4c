"""The commands work from a wheel as they do from an editable install."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.own_packages import NAMES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_sweep_from_a_wheel(place, tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves its traces beside the code
    for name in NAMES:
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [
            *[sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"],
            *["--wheel-dir", str(tmp_path), str(source)],
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    assert {p.name for p in home.iterdir() if "dist-info" not in p.name} == set(NAMES)
    place.env["PYTHONPATH"] = str(home)
    cli = [sys.executable, "-P", "-m", "launcher.cli"]
    help_text = place.run(*cli, "--help")
    assert "\n    tiny " in help_text.out
    ended = place.run(*cli, *place.small, "-m", "seed=1,2", "train.steps=1")
    assert ended.code == 0, ended.text
    assert len([run for run in place.runs() if run.is_dir()]) == 2
    assert "Plot" in ended.out
    assert place.names() == {"configs", "words.txt", "runs"}
    shown = place.run(sys.executable, "-P", "-c", "import launcher; print(launcher.__file__)")
    assert Path(shown.out.strip()).is_relative_to(home)
