"""`dsv41-train` from the command line to its last line, in real processes."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import freeze
from launcher.own_packages import HOME
from launcher.run_dir import create
from trainer.exit_codes import ExitCode


def test_a_run_and_what_it_leaves(place) -> None:
    ended = place.train(*place.small, "id=mine")
    assert ended.code == 0, ended.text
    assert place.names() == {"configs", "words.txt", "runs"}
    (run,) = place.runs()
    assert run.name == "mine"
    assert {p.name for p in run.iterdir()} == {
        *["config.yaml", "overrides.txt", "env.json", "code", "attempts"],
        *["metrics.jsonl", "checkpoints", "plots"],
    }
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == [1, 2, 3]
    config = freeze.load(run / "config.yaml")
    assert (config.train.steps, config.optim.lr, config.optim.eps) == (3, 4e-3, 1e-20)
    assert config.problems() == []
    outcome = json.loads((run / "attempts/001/outcome-00000.json").read_text())
    assert (outcome["code"], outcome["step"]) == (0, 3)
    log = (run / "attempts/001/rank-00000.log").read_text()
    lines = ended.out.splitlines()
    assert [line for line in lines if line.startswith("step ")][:3] == log.splitlines()[:3]
    tail = dict(line.split(None, 1) for line in lines[-3:])
    assert Path(tail["Run"]) == run
    assert Path(tail["Plot"]).read_bytes()[:4] == b"\x89PNG"
    assert tail["Next"].split()[0].endswith("dsv41-train")

    again = place.train(*place.small, "id=mine")
    assert again.code == ExitCode.CONFIG
    assert "resume=auto" in again.err
    assert len(again.text.splitlines()) < 10
    finished = place.train(*place.small, "id=mine", "resume=auto")
    assert finished.code == ExitCode.CONFIG
    assert "is finished" in finished.err
    assert len(list((run / "attempts").iterdir())) == 1


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, ExitCode.INTERRUPTED, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ExitCode.AGAIN, marks=pytest.mark.long),
    ],
)
def test_stopped_and_resumed_by_the_printed_command(place, number, code) -> None:
    small = (*place.small, "train.steps=30")
    stopped = place.train_until(2, number, *small)
    assert stopped.code == code, stopped.text
    (run,) = place.runs()
    saved = [p.name for p in (run / "checkpoints").iterdir()]
    assert len(saved) == 1
    assert json.loads((run / "attempts/001/outcome-00000.json").read_text())["code"] == code
    resume = next(line for line in stopped.err.splitlines() if line.startswith("Resume"))
    resumed = place.run(*shlex.split(resume)[1:])
    assert resumed.code == 0, resumed.text
    assert "attempt 2" in resumed.out
    assert place.runs() == [run]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == list(range(1, 31))
    assert (run / "attempts/002/outcome-00000.json").is_file()


@pytest.mark.slow
def test_resume_auto_without_an_unfinished_run_starts_one(place) -> None:
    ended = place.train(*place.small, "resume=auto", "train.steps=1")
    assert ended.code == 0, ended.text
    assert "starting a new run" in ended.out


def test_all_errors_at_once(place) -> None:
    ended = place.train(
        *["+experiment=tinny", "train.stepz=5", "+typo=1", "optim.lr=fast", "modle=flash"],
        *["eval.every=${nowhere}", "data=text", "data.paths=[/no/such/file]", "id=a/b"],
    )
    assert ended.code == ExitCode.CONFIG
    for start in [
        "experiment=tinny does not exist; did you mean experiment=tiny?",
        "train.stepz is not a setting; did you mean train.steps?",
        "typo is not a setting",
        "optim.lr=fast must be a number",
        "modle is not a setting; did you mean model?",
        "eval.every=${nowhere} cannot be resolved",
        "data.paths: /no/such/file: no such file",
    ]:
        assert f"\n  {start}" in ended.err, start
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert place.names() == {"configs", "words.txt"}


@pytest.mark.parametrize(
    "words", [["--bogus"], ["+experiment=tiny", "what is this"], ["--run", "--multirun"]]
)
def test_wrong_usage(place, words: list[str]) -> None:
    ended = place.train(*words)
    assert ended.code == ExitCode.USAGE
    assert "Traceback" not in ended.err
    assert place.names() == {"configs", "words.txt"}


def test_a_run_below_a_file_cannot_be_created(place) -> None:
    ended = place.train(*place.small, "runs_dir=words.txt/runs")
    assert ended.code == ExitCode.CANNOT_CREATE
    assert "words.txt/runs" in ended.err
    assert "runs_dir=FOLDER" in ended.err
    assert place.names() == {"configs", "words.txt"}


def test_a_full_disk(place) -> None:
    disk = place.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        ended = place.train(*place.small, f"runs_dir={disk}")
        assert ended.code == ExitCode.CANNOT_CREATE
        assert "No space left on device" in ended.err
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_bad_data_names_file_and_line_and_leaves_nothing(place) -> None:
    (place.folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    ended = place.train(*place.small, "data=jsonl", "data.paths=[bad.jsonl]")
    assert ended.code == ExitCode.BAD_DATA, ended.text
    assert "bad.jsonl:2: not JSON" in ended.err
    assert place.names() == {"configs", "words.txt", "bad.jsonl"}


def test_ranks_of_another_launcher_are_refused(place) -> None:
    ended = place.train(*place.small, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert ended.code == ExitCode.CONFIG
    assert "WORLD_SIZE=2" in ended.err


def test_hydras_own_habits(place) -> None:
    help_text = place.train("--help", "--config-dir", "configs")
    assert help_text.code == 0
    assert "\n    small          trains in seconds\n" in help_text.out
    shown = place.train("--cfg", "job", *place.small, "train.steps=7")
    assert shown.code == 0
    assert "\n  steps: 7\n" in shown.out
    assert "\nhydra:" not in shown.out
    assert place.names() == {"configs", "words.txt"}


@pytest.mark.slow
def test_a_sweep_runs_every_point_and_what_failed_can_be_run_again(place) -> None:
    (place.folder / "later.txt").write_bytes(b"\xff\xfe\xff")
    ended = place.train(
        *[*place.small, "-m", "train.steps=1", "data.paths=[later.txt],[words.txt]"]
    )
    assert ended.code == ExitCode.BAD_DATA, ended.text
    bad, good = (line.split() for line in ended.out.splitlines() if line.startswith("00"))
    assert bad[:4] == ["000", "could", "not", "begin"]
    assert (good[:3], good[-1]) == (["001", "done", "1/1"], "data.paths=[words.txt]")
    assert "later.txt:1: not UTF-8" in ended.err
    (sweep,) = (place.folder / "runs").iterdir()
    assert f"dsv41 sweep retry {sweep}" in ended.err
    assert (sweep / "sweep.png").is_file()

    (place.folder / "later.txt").write_text("so it was mended and read after all " * 40)
    again = place.run("dsv41", "sweep", "retry", str(sweep))
    assert again.code == 0, again.text
    told = json.loads(place.run("dsv41", "sweep", "status", str(sweep), "--json").out)
    assert [point["state"] for point in told] == ["done", "done"]
    best = json.loads(place.run("dsv41", "sweep", "best", str(sweep), "--json").out)
    assert best["objective"] == min(point["objective"] for point in told)
    assert place.names() == {"configs", "words.txt", "later.txt", "runs"}


@pytest.mark.parametrize("how", ["command", pytest.param("module", marks=pytest.mark.long)])
def test_a_users_own_packages_do_not_shadow_ours(place, how: str) -> None:
    for name in ("data", "model", "conf", "trainer"):
        (place.folder / name).mkdir()
        (place.folder / name / "__init__.py").write_text(f"raise RuntimeError('own {name}')\n")
    (place.folder / "data" / "config.py").write_text("raise RuntimeError('own data')\n")
    words = [*place.small, "train.steps=1", "data.workers=1"]
    if how == "command":
        ended = place.train(*words, env={"PYTHONPATH": "."})
    else:
        ended = place.run(sys.executable, "-m", "launcher.cli", *words)
    assert ended.code == 0, ended.text


@pytest.mark.slow
def test_a_rank_as_a_process_runs_the_snapshot(place) -> None:
    assert place.train(*place.small, "train.steps=1").code == 0
    config = freeze.load(place.runs()[0] / "config.yaml")
    run = create(replace(config, id="ranks"), overrides=[]).folder
    worker = [sys.executable, "-P", "-m", "launcher.worker", str(run.path)]
    env = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONSAFEPATH": "1"}

    good = place.run(*worker, "1", env={**env, "PYTHONPATH": str(run.code)})
    assert good.code == 0, good.text
    assert good.out.startswith("step 1/1 ")
    outcome = run.attempt(1).outcome(0)
    assert outcome is not None
    assert (outcome.code, outcome.step) == (ExitCode.DONE, 1)

    run.new_attempt()
    bad = place.run(*worker, "2", env={**env, "PYTHONPATH": str(HOME)})
    assert bad.code == ExitCode.BUG
    outcome = run.attempt(2).outcome(0)
    assert outcome is not None
    assert outcome.code == ExitCode.BUG
    assert str(run.code) in outcome.message
