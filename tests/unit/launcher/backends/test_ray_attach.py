"""Which runs a Ray cluster keeps, and what a command knows of them without one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from launcher.backends.protocol import OWNED
from launcher.backends.ray.attach import SHOWN_LINES, _near_end, hand_over, living, stays
from launcher.backends.ray.reports import Reports
from launcher.backends.ray.resident import actor_name
from launcher.backends.ray.work import how_it_ended
from launcher.handover import take_over
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder, create
from launcher.submission import Submission
from trainer.exit_codes import ExitCode
from trainer.outcome import Outcome

NOBODY = "127.0.0.1:1"


def in_cluster(config: RunConfig, address: str | None = NOBODY) -> RunConfig:
    ray = replace(config.launcher.ray, address=address)
    return replace(config, launcher=replace(config.launcher, kind="ray", ray=ray))


@pytest.fixture
def kept(tiny: RunConfig) -> RunFolder:
    """A run that a cluster was given which is gone."""
    folder = create(in_cluster(tiny), overrides=[]).folder
    Submission([], {}, 1).write(folder)
    return folder


def test_only_a_running_cluster_keeps_runs_and_no_points_of_a_sweep(tiny, monkeypatch) -> None:
    assert stays(in_cluster(tiny))
    assert not stays(in_cluster(tiny, None))
    assert not stays(tiny)
    monkeypatch.setenv(OWNED, "1")
    assert not stays(in_cluster(tiny))


def test_a_run_that_no_cluster_can_keep_is_not_looked_for(tiny: RunConfig, kept) -> None:
    config = in_cluster(tiny)
    kept.submission_file.rename(kept.path / "aside")
    assert living(kept, config) is None
    (kept.path / "aside").rename(kept.submission_file)
    kept.ended_file.write_text('{"code": 75, "reason": "stopped", "step": 4}')
    assert living(kept, config) is None
    assert not (kept.path / "ray.log").exists()  # nobody has asked


def test_a_cluster_that_is_gone_matters_only_to_a_run_that_goes_on_there(tiny, kept) -> None:
    with pytest.raises(Stop, match=f"{NOBODY} cannot be reached") as refused:
        living(kept, in_cluster(tiny))
    assert refused.value.code == ExitCode.CONFIG
    assert living(kept, in_cluster(tiny, "127.0.0.1:2")) is None


def test_a_run_that_cannot_be_handed_over_stays_held_and_was_never_submitted(tiny) -> None:
    config = in_cluster(tiny)
    folder = create(config, overrides=[]).folder
    with ExitStack() as held:
        held.enter_context(folder.held())
        with pytest.raises(Stop, match="cannot be reached"):
            hand_over(folder, config, [], given={}, held=held, say=print)
        assert folder.is_held()
    assert not folder.submission_file.exists()


def test_a_supervisor_runs_the_runs_own_code(kept: RunFolder) -> None:
    with pytest.raises(Stop, match=r"must run .*, not launcher from") as refused:
        take_over(kept, say=print, backend=lambda config: pytest.fail("it went on"))
    assert refused.value.code == ExitCode.BUG


@pytest.mark.parametrize("text", [None, "", '{"code": 0', "[]", '{"code": 3}'])
def test_an_end_without_a_word(kept: RunFolder, text: str | None) -> None:
    if text is not None:
        kept.ended_file.write_text(text)
    assert how_it_ended(kept) is None


def test_an_end_is_read_as_it_was_written(kept: RunFolder) -> None:
    kept.ended_file.write_text(
        '{"code": 77, "reason": "diverged", "step": 9, "message": "m", "ended": 1.5}'
    )
    assert how_it_ended(kept) == Outcome(ExitCode.DIVERGED, "diverged", 9, "m")


def test_a_run_is_known_by_where_it_lies_whatever_leads_there(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "small" / "1").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    a, b, same = (RunFolder(tmp_path / name / "small" / "1") for name in ("a", "b", "link"))
    assert actor_name(a).startswith("small/1 ")
    assert actor_name(a) == actor_name(same) != actor_name(b)


@pytest.mark.parametrize("lines", [0, 3, SHOWN_LINES, SHOWN_LINES + 1, 50_000])
def test_who_comes_back_sees_the_last_lines(tmp_path, lines: int) -> None:
    log = tmp_path / "supervisor.log"
    assert _near_end(log) == 0
    log.write_text("".join(f"step {number}\n" for number in range(lines)))
    shown = log.read_bytes()[_near_end(log) :].decode().splitlines()
    assert shown == [f"step {number}" for number in range(lines)][-SHOWN_LINES:]


def test_all_that_a_process_reported_is_heard_after_its_end() -> None:
    code = "from launcher.backends.ray.reports import Report\nr = Report()\nprint('noise')\n"
    code += "[r('step', number=n) for n in range(100)]"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    reports = Reports(process)
    process.wait()
    assert reports.new(0.5) == [{"state": "step", "number": n} for n in range(100)]
    assert reports.new(0.0) == []
