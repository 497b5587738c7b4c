"""`dsv41 data prepare` and `check`, called as the command calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.errors import CacheError
from launcher import tools
from launcher.data_tools import prepare as preparing
from launcher.data_tools.view import SourceView
from trainer.exit_codes import ExitCode

TOKENIZER = Path(__file__).parents[2] / "golden" / "tokenizer.json"
MODEL = [
    *["model.vocab_size=448", "model.engram_compressed_vocab_size=323"],
    *["model.engram_layer_ids=[1]", "model.engram_num_embeddings=[384]"],
    *["model.engram_vocab_size=50", "model.engram_n_heads=2", "model.image_token_id=3"],
]


@pytest.fixture
def data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """data(action, *words): (code, out, err) of the command on tmp_path/corpus.jsonl."""

    def call(action: str, *words: str) -> tuple[int, str, str]:
        given = [
            *["data", action, "+experiment=tiny", "data=jsonl", *MODEL],
            f"data.paths=[{tmp_path / 'corpus.jsonl'}]",
            *[f"data.tokenizer={TOKENIZER}", f"data.cache_dir={tmp_path / 'cache'}", *words],
        ]
        code = tools.main(given)
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.fixture
def write(tmp_path: Path):
    def written(*values: object) -> None:
        lines = [v if isinstance(v, str) else json.dumps(v) for v in values]
        (tmp_path / "corpus.jsonl").write_text("\n".join(lines))

    return written


def test_prepare_says_what_there_is(data, write, tmp_path) -> None:
    write({"text": "the cat"}, {"text": "sat"})
    code, out, err = data("prepare")
    assert (code, err) == (ExitCode.DONE, "")
    (folder,) = (tmp_path / "cache").iterdir()
    assert out.splitlines()[0].startswith("2 documents, ")
    assert out.splitlines()[0].endswith(str(folder))
    assert data("prepare")[0] == ExitCode.DONE


def test_options_may_stand_anywhere(tmp_path, write, capsys) -> None:
    write({"text": "the cat"})
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    experiment = f"""\
# @package _global_
defaults: [tiny, {{override /data: jsonl}}]
data:
  paths: [{tmp_path / "corpus.jsonl"}]
  tokenizer: {TOKENIZER}
  cache_dir: {tmp_path / "cache"}
"""
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(experiment)
    words = ["--config-dir", str(tmp_path / "configs"), "+experiment=mine", *MODEL]
    assert tools.main(["data", "prepare", *words]) == ExitCode.DONE
    words = [words[2], *words[:2], *words[3:]]
    assert tools.main(["data", "check", *words]) == ExitCode.DONE


def test_check_lists_and_ends_with_65(data, write, tmp_path) -> None:
    write({"text": "the cat"}, "{", {"text": "the cat"}, {"body": 1})
    code, out, err = data("check")
    assert code == ExitCode.BAD_DATA
    path = tmp_path / "corpus.jsonl"
    assert [line.split(": ")[0] for line in out.splitlines()] == [
        *[f"{path}:2", f"{path}:4", f"{path}:3"]
    ]
    assert "data: 2 documents can be used, 1 of them duplicates; 3 line(s) to look at" in err
    assert not (tmp_path / "cache").exists()
    write({"text": "the cat"}, {"text": "sat"})
    code, out, err = data("check")
    assert (code, out) == (ExitCode.DONE, "")


@pytest.mark.parametrize("action", ["prepare", "check"])
def test_a_configuration_with_faults_lists_them(data, write, action) -> None:
    write({"text": "x"})
    code, _, err = data(action, "data.kind=chatt", "data.split=", "optim.lrr=1", "data=tex")
    assert code == ExitCode.CONFIG
    assert "data=tex does not exist; did you mean data=text?" in err
    assert "optim.lrr is not a setting" in err
    assert "Traceback" not in err


def test_a_machine_too_small_to_train_on_can_prepare(data, write) -> None:
    write({"text": "the cat"})
    assert data("prepare", "model.moe_intermediate_size=100000000")[0] == ExitCode.DONE


@pytest.mark.parametrize("action", ["prepare", "check"])
def test_bad_files_end_with_65(data, write, tmp_path, action) -> None:
    write()
    code, _, err = data(action)
    assert code == ExitCode.BAD_DATA
    assert f"{tmp_path / 'corpus.jsonl'}: the file is empty" in err


def test_a_cache_that_cannot_be_made_ends_with_73(data, write, tmp_path) -> None:
    write({"text": "x"})
    (tmp_path / "file").write_text("")
    code, _, err = data("prepare", f"data.cache_dir={tmp_path / 'file' / 'cache'}")
    assert code == ExitCode.CANNOT_CREATE
    assert "data.cache_dir=FOLDER" in err
    assert len(err.splitlines()) == 1


def test_a_full_cache_ends_with_74(data, write, monkeypatch) -> None:
    write({"text": "x"})

    def full(*given: object, **settings: object) -> None:
        raise CacheError("needs about 5 bytes more", full=True)

    monkeypatch.setattr(preparing, "prepare", full)
    code, _, err = data("prepare")
    assert (code, err) == (ExitCode.IO_ERROR, "dsv41 data prepare: needs about 5 bytes more\n")


def test_an_interrupt_says_that_work_is_kept(data, write, monkeypatch) -> None:
    write({"text": "x"})

    def stop(*given: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing, "prepare", stop)
    code, _, err = data("prepare")
    assert code == ExitCode.INTERRUPTED
    assert err == "dsv41 data prepare: interrupted; what is done is kept.\n"


def test_progress_lines_come_now_and_then(capsys, monkeypatch) -> None:
    with SourceView("preparing") as view:
        view("data", 10, 100)
        monkeypatch.setattr("launcher.data_tools.view.LINE_SECONDS", 0.0)
        view("data", 50, 100)
        view("data", 2_000_000, None)
    assert capsys.readouterr().err.splitlines() == [
        *["preparing data: 50 %", "preparing data: 2 MB"]
    ]


def test_inspect_shows_figures_a_picture_and_packs(data, write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write({"text": "the cat sat"}, {"text": "on the mat " * 40})
    code, out, _ = data("inspect", "data.pack_length=64", "data.holdout=0")
    assert code == ExitCode.DONE
    said = " ".join(out.split())
    assert "documents 2, 5 cuts where one is longer than a pack tokens " in said
    assert "documents by length in tokens" in said
    assert "of the tokens are learnt" in said
    assert "for training, 0 held out" in said
    assert "tokens of the first steps look up" in said
    assert f"{tmp_path / 'corpus.jsonl'}:2, from its token" in out
    assert "⟩" in out
    assert (tmp_path / "tiny-documents.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_packs_are_planned_with_the_documents(data, write, tmp_path) -> None:
    write({"text": "the cat"}, {"text": "sat"}, {"text": "down"})

    def planned() -> int:
        return len(list((tmp_path / "cache").glob("*/window-*/plan-*/plan.json")))

    code, _, _ = data("prepare", "data.window_documents=1", "data.holdout=0")
    assert (code, planned()) == (ExitCode.DONE, 3)
    words = ["data.holdout=0", "data.pack_length=4", "data.on_long_document=refuse"]
    code, _, err = data("prepare", *words)
    assert code == ExitCode.BAD_DATA
    assert "corpus.jsonl:1: " in err and "more than a pack of 4" in err
