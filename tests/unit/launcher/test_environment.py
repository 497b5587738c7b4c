"""What env.json says about code and checkout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from launcher.environment import code_digest, describe, git_state


def test_digest_changes_with_any_source_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    source = tmp_path / "model" / "a.py"
    source.write_text("x = 1\n")
    before = code_digest(tmp_path)
    (tmp_path / "model" / "__pycache__").mkdir()
    (tmp_path / "model" / "__pycache__" / "a.pyc").write_text("")
    (tmp_path / "elsewhere.py").write_text("")
    assert code_digest(tmp_path) == before
    source.write_text("x = 2\n")
    changed = code_digest(tmp_path)
    source.rename(source.with_name("b.py"))
    assert len({before, changed, code_digest(tmp_path)}) == 3


def test_git_state(tmp_path: Path) -> None:
    def git(*args: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(
            ["git", *who, "-C", str(tmp_path), *args], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-b", "main")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    state = git_state(tmp_path)
    assert state is not None
    assert (state["commit"], state["branch"], state["changed"]) == (
        git("rev-parse", "HEAD"),
        "main",
        [],
    )
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None
    assert state["changed"] == [" M file"]


def test_no_secrets_and_plain_data(monkeypatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hush-hush")
    assert "hush-hush" not in json.dumps(describe())
