"""dsv41 generate on a run that was really trained: texts, and refusals for people."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher import tools
from launcher.generate import pieces
from launcher.run_dir import create
from launcher.validate import validate
from tests.builders import SMALL_MODEL
from trainer.exit_codes import ExitCode
from trainer.loop import train
from trainer.ranks import Ranks

GOLDEN = Path(__file__).parents[2] / "golden"
SMALL = (
    "data=text",
    *SMALL_MODEL,
    "data.holdout=0",
    "train.steps=2",
    "train.threads=1",
    "eval.every=0",
)


@pytest.fixture
def make_run(composed, tmp_path):
    """make_run(*overrides) -> (folder of a new small run, its configuration)."""
    (tmp_path / "a.txt").write_text("the engram memory remembers the words " * 30)

    def make(*overrides):
        paths = (f"data.paths=[{tmp_path / 'a.txt'}]", f"runs_dir={tmp_path / 'runs'}")
        config = validate(composed("+experiment=tiny", *SMALL, *paths, *overrides), environ={})
        new = create(config, overrides=[])
        return new.folder.path, new.config

    return make


def trained(config, folder: Path) -> None:
    outcome = train(
        config, run_dir=folder, attempt=1, ranks=Ranks(), resume=False, say=lambda text: None
    )
    assert outcome.code == ExitCode.DONE


def test_texts_from_a_run(make_run, capsys):
    folder, config = make_run()
    trained(config, folder)
    words = ["generate", str(folder), "--prompt", "the engram", "--max-tokens", "5", "--num", "2"]
    assert tools.main(words) == ExitCode.DONE
    out, err = capsys.readouterr()
    first, second = out.rstrip("\n").split("\n\n", 1)
    assert first.startswith("the engram") and second.startswith("the engram")
    assert first != second
    assert f"{folder}, step 2" in err and "tokens in" in err
    assert tools.main(words) == ExitCode.DONE
    assert capsys.readouterr().out == out
    assert tools.main([*words, "--seed", "1"]) == ExitCode.DONE
    assert capsys.readouterr().out != out
    # Reading leaves the run as it is.
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000002"]
    assert tools.main(["generate", str(folder), "--max-tokens", "2000000"]) == ExitCode.USAGE
    assert "the model holds 1,048,576" in capsys.readouterr().err
    for file in (folder / "checkpoints" / "step_00000002").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    assert tools.main(words) == ExitCode.IO_ERROR
    assert "No checkpoint of this run is whole" in capsys.readouterr().err


def test_what_cannot_be_sampled_is_explained(make_run, capsys, tmp_path):
    folder, _ = make_run()
    assert tools.main(["generate", str(folder)]) == ExitCode.CONFIG
    assert "has no checkpoint yet; wait for its first" in capsys.readouterr().err
    assert tools.main(["generate", str(folder.parent)]) == ExitCode.CONFIG  # the newest there
    assert f"{folder} has no checkpoint yet" in capsys.readouterr().err
    there = ["--runs-dir", str(folder.parent.parent)]
    assert tools.main(["generate", folder.parent.name, *there]) == ExitCode.CONFIG
    assert f"{folder} has no checkpoint yet" in capsys.readouterr().err
    assert tools.main(["generate", str(tmp_path / "none"), *there]) == ExitCode.USAGE
    assert "none is no run's folder, nor a folder of weights" in capsys.readouterr().err
    bad = ["--top-p", "0", "--num", "0", "--seed", "-1", "--temperature", "-2"]
    assert tools.main(["generate", str(folder), *bad]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert all(f"--{name}" in told for name in ("top-p", "num", "seed", "temperature"))


def test_texts_from_a_folder_of_weights(capsys, tmp_path):
    folder = tmp_path / "tiny_text"
    shutil.copytree(GOLDEN / "tiny_text", folder)
    words = ["generate", str(folder), "--prompt", "the", "--max-tokens", "3"]
    assert tools.main(words) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("the")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert tools.main(words) in (ExitCode.BAD_DATA, ExitCode.CONFIG)
    assert "is truncated" in capsys.readouterr().err
    (folder / "config.json").write_text("{}")
    assert tools.main(words) == ExitCode.CONFIG
    assert "text_config" in capsys.readouterr().err


def test_half_a_character_waits_for_its_other_half():
    def decode(ids, skip_special_tokens):
        return bytes(ids).decode(errors="replace")

    euro, seen = "€".encode(), list(b"a ")
    assert list(pieces(decode, seen, iter([*euro, *b"b", euro[0]]))) == ["€", "b", "\ufffd"]
    assert bytes(seen) == b"a " + euro + b"b" + euro[:1]
