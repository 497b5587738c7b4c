"""`dsv41 doctor` as a whole: what it prints and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import tools
from launcher.doctor import command
from launcher.doctor.check import Check, Finding
from trainer.exit_codes import ExitCode

GOOD = Check("disk", lambda: Finding("ok", "wide"))
DOUBTFUL = Check("W&B", lambda: Finding("warn", "offline", "later"))
BAD = Check("ports", lambda: Finding("fail", "taken", "another"))


def told(monkeypatch, capsys, checks: list[Check], *words: str) -> tuple[int, str]:
    monkeypatch.setattr(command, "all_checks", lambda config, *, environ: checks)
    code = tools.main(["doctor", *words])
    return code, capsys.readouterr().out


def test_warnings_are_no_failure(monkeypatch, capsys) -> None:
    code, out = told(monkeypatch, capsys, [GOOD, DOUBTFUL])
    assert code == ExitCode.DONE
    assert out == (
        "ok    disk  wide\nwarn  W&B   offline\n            -> later\n\n"
        "2 checks: 0 failed, 1 with a warning\n"
    )


def test_a_failure_ends_with_78(monkeypatch, capsys) -> None:
    code, out = told(monkeypatch, capsys, [BAD, GOOD], "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == ExitCode.CONFIG
    assert document["checks"][0] == {
        "name": "ports", "level": "fail", "found": "taken", "fix": "another",
    }  # fmt: skip


def test_wrong_words_are_refused_before_any_check(capsys) -> None:
    assert tools.main(["doctor", "+experiment=tinny"]) == ExitCode.CONFIG
    shown = capsys.readouterr()
    assert shown.out == "" and "did you mean experiment=tiny?" in shown.err


def test_a_run_that_is_named_brings_its_own_folders(tiny, tmp_path: Path) -> None:
    checks = {check.name: check for check in command.all_checks(tiny, environ={})}
    assert str(tmp_path / "runs") in checks["runs_dir"].look().found
    assert str(tiny.data.cache_folder) in checks["caches"].look().found


def test_the_address_of_the_runs_cluster_is_tried(tiny) -> None:
    ray = replace(tiny.launcher.ray, address="127.0.0.1:1")
    config = replace(tiny, launcher=replace(tiny.launcher, kind="ray", ray=ray))
    checks = {check.name: check for check in command.all_checks(config, environ={})}
    assert checks["Ray"].look().level == checks["Ray"].late == "fail"
    elsewhere = replace(config, launcher=replace(config.launcher, kind="local"))
    checks = {check.name: check for check in command.all_checks(elsewhere, environ={})}
    assert checks["Ray"].look().level == "ok"


@pytest.mark.slow
def test_the_disk_is_held_against_the_runs_checkpoints(tiny) -> None:
    checks = {check.name: check for check in command.all_checks(tiny, environ={})}
    found = checks["disk"].look()
    assert found.level == "ok" and "3 checkpoints of tiny take" in found.found
