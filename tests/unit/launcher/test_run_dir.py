"""A run's folder: whole or not there, exclusive, held by one process, and what is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data.cache.prepare import prepare
from data.cache.prepared import PreparedSet
from data.errors import DataError
from launcher import freeze, run_dir
from launcher.environment import code_digest
from launcher.own_packages import HOME
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder, create
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome


def test_what_a_run_holds(tiny: RunConfig) -> None:
    new = create(tiny, overrides=["+experiment=tiny", "seed=1"])
    path = new.folder.path
    assert path.parent == Path(tiny.runs_dir) / "tiny"
    assert freeze.load(path / "config.yaml") == new.config == replace(tiny, id=path.name)
    assert (path / "overrides.txt").read_text() == "+experiment=tiny\nseed=1\n"
    env = json.loads((path / "env.json").read_text())
    assert env["packages"]["torch"]
    assert env["code_sha256"] == code_digest(path / "code") == code_digest(HOME)
    assert (path / "code/conf/experiment/tiny.yaml").is_file()
    assert not list(path.rglob("__pycache__"))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_ids_sort_by_age_and_differ() -> None:
    ids = [run_dir.new_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert [i[:15] for i in ids] == sorted(i[:15] for i in ids)


def test_an_id_is_given_out_once(tiny: RunConfig) -> None:
    create(replace(tiny, id="mine"), overrides=[])
    with pytest.raises(Stop) as caught:
        create(replace(tiny, id="mine"), overrides=[])
    assert caught.value.code == ExitCode.CONFIG
    assert "resume=auto" in caught.value.message
    assert [p.name for p in tiny.home.iterdir()] == ["mine"]


def test_an_empty_folder_is_not_taken_over(tiny: RunConfig) -> None:
    (tiny.home / "mine").mkdir(parents=True)
    with pytest.raises(Stop):
        create(replace(tiny, id="mine"), overrides=[])
    assert list((tiny.home / "mine").iterdir()) == []


@pytest.mark.parametrize("stage", ["to_yaml", "describe", "copytree"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_when_making_it_fails(
    tiny: RunConfig, monkeypatch, stage: str, error: BaseException
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    owner = {"to_yaml": run_dir.freeze, "describe": run_dir, "copytree": run_dir.shutil}[stage]
    monkeypatch.setattr(owner, stage, fail)
    with pytest.raises(Stop if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        create(tiny, overrides=[])
    if isinstance(caught.value, Stop):
        assert caught.value.code == ExitCode.CANNOT_CREATE
        assert "No space left on device" in caught.value.message
        assert "runs_dir=FOLDER" in caught.value.message
    assert not Path(tiny.runs_dir).exists()


def test_folders_that_were_there_stay(tiny: RunConfig, monkeypatch) -> None:
    tiny.home.mkdir(parents=True)
    monkeypatch.setattr(run_dir, "describe", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        create(tiny, overrides=[])
    assert list(tiny.home.iterdir()) == []


def test_below_a_file_nothing_can_be_made(tiny: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Stop) as caught:
        create(replace(tiny, runs_dir=str(tmp_path / "file" / "runs")), overrides=[])
    assert caught.value.code == ExitCode.CANNOT_CREATE


def test_attempts_count_up_and_know_how_they_ended(tiny: RunConfig) -> None:
    folder = create(tiny, overrides=[]).folder
    assert (folder.last_attempt(), folder.finished()) == (0, False)
    first = folder.new_attempt()
    assert (first.number, first.path.name) == (1, "001")
    assert first.outcome(0) is None
    first.write_outcome(0, Outcome(ExitCode.AGAIN, "stopped", 4, "why"))
    assert first.outcome(0) == Outcome(ExitCode.AGAIN, "stopped", 4, "why")
    assert not folder.finished()
    second = folder.new_attempt()
    second.write_outcome(0, Outcome(ExitCode.DONE, "done", 9))
    assert (second.number, folder.finished()) == (2, True)
    second.event("end", code=0)
    second.event("more")
    events = [json.loads(line) for line in (second.path / "events.jsonl").open()]
    assert [e["event"] for e in events] == ["end", "more"]
    third = folder.new_attempt()
    third.outcome_file(0).write_text("{")  # cut short by a crash
    assert (third.outcome(0), folder.finished()) == (None, False)


def test_ranks_are_told_where_the_data_is(tiny: RunConfig) -> None:
    attempt = create(tiny, overrides=[]).folder.new_attempt()
    assert attempt.sources() is None
    (made,) = prepare(tiny.data, tiny.model)
    sources = [replace(made, name="web", weight=0.5, epochs=2), made]
    attempt.write_sources(sources)
    assert attempt.sources() == sources
    attempt.write_sources([replace(made, set=PreparedSet(Path("/gone")))])
    with pytest.raises(DataError, match=r"set\.json cannot be read"):
        attempt.sources()


def test_a_run_is_held_by_one_process(tiny: RunConfig) -> None:
    folder = create(tiny, overrides=[]).folder
    other = (
        "import sys; from pathlib import Path; from launcher.run_dir import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).held() as ours: print(ours)"
    )

    def asks() -> str:
        done = subprocess.run(
            [sys.executable, "-c", other, str(folder.path)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(HOME)},
        )
        return done.stdout.strip()

    with folder.held() as ours:
        assert ours
        assert asks() == "False"
    assert asks() == "True"


def test_bare_and_discarded(tiny: RunConfig) -> None:
    new = create(tiny, overrides=[])
    folder = new.folder
    attempt = folder.new_attempt()
    attempt.log(0).write_text("reading\n")
    assert folder.is_bare()
    attempt.log(0).write_text("reading\nTraceback (most recent call last):\n")
    assert not folder.is_bare()
    attempt.log(0).write_text("")
    (folder.path / "metrics.jsonl").write_text("{}\n")
    assert not folder.is_bare()
    (folder.path / "metrics.jsonl").unlink()
    (folder.path / "checkpoints/step_00000001").mkdir()
    assert not folder.is_bare()
    new.discard()
    assert not Path(tiny.runs_dir).exists()


def test_newest_run_first(tiny: RunConfig) -> None:
    made = [create(replace(tiny, id=name), overrides=[]).folder for name in ("b", "c", "a")]
    for age, folder in enumerate(made):
        os.utime(folder.config_file, (1000 + age, 1000 + age))
    (tiny.home / "stray").mkdir()
    assert run_dir.runs_of(tiny) == [RunFolder(tiny.home / name) for name in ("a", "c", "b")]
