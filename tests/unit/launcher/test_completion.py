"""The scripts that `dsv41 completion` prints, run by the shells that there are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher import tools
from launcher.completion import all_commands

BASH = """
source {script}
try() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _dsv41; echo "${{COMPREPLY[*]}}"; }}
try {words}
"""
ZSH = """
compdef() {{ }}
_describe() {{ print -rn -- "${{(P)2%%:*}} " }}
compadd() {{ shift; print -rn -- "$* " }}
_files() {{ }}
source {script}
words=({words}); CURRENT={count}
_dsv41
"""


def script_for(shell: str, folder: Path, capsys) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert tools.main(["completion", shell]) == 0
    script = folder / f"script.{shell}"
    script.write_text(capsys.readouterr().out)
    run = folder / "runs" / "tiny" / "20260101"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    (folder / "runs" / "stray").mkdir()
    return script


def completed(shell: str, script: Path, *words: str) -> set[str]:
    """What the shell offers for the last of `words`, among other things perhaps."""
    quoted = " ".join(f"'{word}'" for word in words)
    if shell == "bash":
        text = BASH.format(script=script, words=quoted)
    elif shell == "zsh":
        text = ZSH.format(script=script, words=quoted, count=len(words))
    else:
        text = f"source {script}; complete -C {' '.join(words)!r} | string split -f1 \\t"
    done = subprocess.run(
        [shell, "-c", text], cwd=script.parent, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_commands_actions_options_and_runs(shell: str, tmp_path: Path, capsys) -> None:
    script = script_for(shell, tmp_path, capsys)
    assert {"status", "stop"} & completed(shell, script, "dsv41", "st")
    assert "verify" in completed(shell, script, "dsv41", "checkpoint", "v")
    assert "--json" in completed(shell, script, "dsv41", "status", "--j")
    assert completed(shell, script, "dsv41", "status", "ti") == {"tiny/20260101"}


def test_bash_offers_nothing_where_nothing_fits(tmp_path: Path, capsys) -> None:
    script = script_for("bash", tmp_path, capsys)
    assert completed("bash", script, "dsv41", "status", "zz") == set()
    shutil.rmtree(tmp_path / "runs")
    assert not any("*" in word for word in completed("bash", script, "dsv41", "status", ""))


def test_every_command_is_known_with_what_it_takes() -> None:
    commands = {command.name: command for command in all_commands()}
    assert commands.keys() == tools.COMMANDS.keys()
    assert commands["checkpoint"].words == ("list", "verify", "prune")
    assert commands["logs"].runs and not commands["plan"].runs
    follow = next(o for o in commands["logs"].options if "-f" in o.names)
    lines = next(o for o in commands["logs"].options if "-n" in o.names)
    assert not follow.takes_value and lines.takes_value
