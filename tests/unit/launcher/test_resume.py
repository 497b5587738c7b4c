"""Which run a command continues, and which it refuses to."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.backends.slurm import queue
from launcher.backends.slurm.queue import note
from launcher.problems import Stop
from launcher.resume import as_last, continued, given_now, moved, open_run
from launcher.run_config import RunConfig
from launcher.run_dir import NewRun, RunFolder, create
from launcher.submission import Submission
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

SECONDS = iter(range(1000, 9000))


def made(config: RunConfig, name: str, code: ExitCode | None) -> RunFolder:
    """A run with one attempt that ended with `code`; None = died without a word."""
    folder = create(replace(config, id=name), overrides=[]).folder
    attempt = folder.new_attempt()
    if code is not None:
        attempt.write_outcome(0, Outcome(code, "reason", 1))
    age = next(SECONDS)
    os.utime(folder.config_file, (age, age))
    return folder


def opened(config: RunConfig) -> tuple[NewRun | RunFolder, str]:
    said: list[str] = []
    with ExitStack() as held:
        return open_run(config, overrides=[], held=held, say=said.append), "\n".join(said)


def refused(config: RunConfig) -> str:
    before = sorted(p for p in Path(config.runs_dir).rglob("*"))
    with pytest.raises(Stop) as caught:
        opened(config)
    assert caught.value.code == ExitCode.CONFIG
    assert sorted(p for p in Path(config.runs_dir).rglob("*")) == before
    return caught.value.message


@pytest.fixture
def auto(tiny: RunConfig) -> RunConfig:
    return replace(tiny, resume="auto")


def test_never_makes_a_new_run(tiny: RunConfig) -> None:
    made(tiny, "old", None)
    run, said = opened(tiny)
    assert isinstance(run, NewRun)
    assert said == ""


def test_auto_takes_the_newest_unfinished(tiny: RunConfig, auto: RunConfig) -> None:
    made(tiny, "older", ExitCode.AGAIN)
    wanted = made(auto, "newer", ExitCode.INTERRUPTED)
    made(tiny, "done", ExitCode.DONE)
    run, said = opened(auto)
    assert run == wanted
    assert "attempt 2" in said


def test_a_rank_that_died_without_a_word_is_unfinished(tiny: RunConfig, auto: RunConfig) -> None:
    folder = made(tiny, "x", None)
    assert opened(auto)[0] == folder


def test_auto_starts_anew_when_nothing_is_unfinished_and_says_so(
    tiny: RunConfig, auto: RunConfig
) -> None:
    made(tiny, "done", ExitCode.DONE)
    run, said = opened(auto)
    assert isinstance(run, NewRun)
    assert "starting a new run" in said


def test_auto_leaves_other_configurations_alone_and_names_the_difference(
    tiny: RunConfig, auto: RunConfig
) -> None:
    wanted = made(tiny, "mine", ExitCode.AGAIN)
    made(replace(tiny, seed=9), "other", ExitCode.AGAIN)
    run, said = opened(auto)
    assert run == wanted
    assert "differs: seed: 9 -> 1" in said


def test_auto_leaves_damaged_configurations_alone(tiny: RunConfig, auto: RunConfig) -> None:
    folder = made(tiny, "odd", ExitCode.AGAIN)
    folder.config_file.write_text("seed: x\n")
    run, said = opened(auto)
    assert isinstance(run, NewRun)
    assert "another version" in said


def test_auto_leaves_running_ones_alone(tiny: RunConfig, auto: RunConfig) -> None:
    folder = made(tiny, "busy", None)
    with folder.held():
        run, said = opened(auto)
    assert isinstance(run, NewRun)
    assert "another process is working on it" in said


def test_a_new_run_is_held(tiny: RunConfig) -> None:
    with ExitStack() as held:
        run = open_run(tiny, overrides=[], held=held, say=print)
        assert isinstance(run, NewRun)
        with run.folder.held() as ours:
            assert not ours


def test_a_given_id_is_continued_even_if_there_is_a_newer(tiny: RunConfig, auto: RunConfig) -> None:
    folder = made(tiny, "mine", ExitCode.AGAIN)
    made(tiny, "newer", ExitCode.AGAIN)
    assert opened(replace(auto, id="mine"))[0] == folder


def test_a_continued_run_keeps_its_settings_but_for_this_attempt(
    tiny: RunConfig, auto: RunConfig
) -> None:
    folder = made(tiny, "x", ExitCode.AGAIN)
    changes = {"cache_dir": "/elsewhere", "processes": 3, "accept_changed": True}
    given = replace(auto, data=replace(auto.data, **changes))
    assert opened(given)[0] == folder
    found = continued(folder, given_now(given, frozen=tiny))
    assert found == replace(tiny, id="x", data=replace(tiny.data, **changes))
    folder.attempt(1).write_given(given_now(given, frozen=tiny))
    assert as_last(folder) == replace(tiny, id="x")  # they hold for one attempt


def elsewhere(config: RunConfig) -> RunConfig:
    """The same run, launched, watched and shown otherwise."""
    slurm = replace(config.launcher.slurm, partition="b", setup=("module load cuda",))
    return replace(
        config,
        launcher=replace(config.launcher, kind="torchrun", slurm=slurm),
        resilience=replace(config.resilience, grace_s=9.0),
        logging=replace(config.logging, every=7),
        cluster=replace(config.cluster, device_memory_gb=80.0),
    )


def test_where_a_run_is_launched_is_not_what_it_computes(tiny: RunConfig, auto: RunConfig) -> None:
    folder = made(tiny, "x", ExitCode.AGAIN)
    before = folder.config_file.read_text()
    run, said = opened(elsewhere(auto))
    assert run == folder
    assert "launcher.kind: local -> torchrun" in said and "logging.every: 1 -> 7" in said
    now = json.loads(json.dumps(given_now(elsewhere(auto), frozen=tiny)))
    assert continued(folder, now) == replace(elsewhere(tiny), id="x")
    assert as_last(folder) == replace(tiny, id="x")

    # From then on it is launched like that, until it is launched otherwise.
    folder.new_attempt().write_given(now)
    assert as_last(folder) == replace(elsewhere(tiny), id="x")
    assert moved(folder, elsewhere(tiny)) == []
    folder.new_attempt().write_given(given_now(tiny, frozen=tiny))
    assert as_last(folder) == replace(tiny, id="x")
    assert folder.config_file.read_text() == before


def test_a_job_that_has_begun_nothing_is_the_last_launch(tiny: RunConfig) -> None:
    folder = made(tiny, "x", ExitCode.AGAIN)
    now = given_now(elsewhere(tiny), frozen=tiny)
    Submission([], now, 2).write(folder)
    assert as_last(folder).launcher.kind == "torchrun"
    folder.new_attempt().write_given({})
    assert as_last(folder).launcher.kind == "local"


def test_a_run_that_waits_in_a_queue_is_left_there(
    tiny: RunConfig, auto: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tiny, "x", ExitCode.AGAIN)
    note(folder, "4711")
    monkeypatch.setattr(queue, "is_listed", lambda job: job == "4711")
    assert "Job 4711 of" in refused(elsewhere(auto))


def test_a_given_id_that_does_not_exist_is_new(auto: RunConfig) -> None:
    run, said = opened(replace(auto, id="mine"))
    assert isinstance(run, NewRun)
    assert "no run mine" in said


def test_refusals(tiny: RunConfig, auto: RunConfig) -> None:
    made(tiny, "open", ExitCode.AGAIN)
    made(tiny, "done", ExitCode.DONE)
    (tiny.home / "stray").mkdir()
    assert "Add resume=auto" in refused(replace(tiny, id="open"))
    assert "is finished" in refused(replace(auto, id="done"))
    assert "seed: 1 -> 3" in refused(replace(auto, id="open", seed=3))
    assert "holds no run" in refused(replace(auto, id="stray"))
    with RunFolder(tiny.home / "open").held():
        assert "another process" in refused(replace(auto, id="open"))
