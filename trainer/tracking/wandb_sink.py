"""Weights & Biases as a view: the run's facts, sent by a process that can be ended."""

from __future__ import annotations

import json
import netrc
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.tracking.config import PROJECT, Mode, WandbConfig
from trainer.tracking.sink import Item, Opened, SinkError

PROGRAM = Path(__file__).with_name("wandb_process.py")
ONLINE_SHARE = 0.7  # of the time to begin; the rest is for the folder, should W&B not answer
ID_LENGTH = 64
OWN_SHARE = 0.75  # of that, after which wandb itself should give up and say why


class WandbSink:
    """The W&B run of the run in `run_dir`, which is runs_dir/name/id.

    mode: online or offline. log: the file that takes what wandb prints. settings: the run's
    configuration, as plain data.
    """

    label = "W&B"

    def __init__(
        self,
        config: WandbConfig,
        *,
        mode: Mode,
        run_dir: Path,
        log: Path,
        settings: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._mode = mode
        self._run_dir = run_dir
        self._log = log
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()

    def open(self) -> Opened:
        """Begin; where W&B cannot be reached, a folder is written instead."""
        limit = self._config.init_timeout_s
        if self._mode == "offline":
            return self._begin("offline", limit)
        try:
            return self._begin("online", limit * ONLINE_SHARE)
        except SinkError as error:  # a fresh process: in the old one, the run's id is taken
            return self._begin("offline", limit * (1 - ONLINE_SHARE), why=f" ({error})")

    def _begin(self, mode: Mode, limit: float, *, why: str = "") -> Opened:
        self._start()
        code = self._run_dir / "code"
        got = self._ask(
            {
                "do": "open",
                "mode": mode,
                "id": wandb_id(self._run_dir),
                "name": f"{self._run_dir.parent.name} {self._run_dir.name}",
                "dir": str(self._run_dir),
                "project": self._config.project or os.environ.get("WANDB_PROJECT") or PROJECT,
                "entity": self._config.entity or None,
                "group": self._config.group or None,
                "tags": list(self._config.tags) or None,
                "config": {**self._settings, "environment": self._environment()},
                "code": str(code) if code.is_dir() else None,
                "init_timeout_s": limit * OWN_SHARE,
            },
            limit,
        )
        if mode == "online":
            return Opened(got["after"], f"W&B: {got['url']}")
        return Opened(got["after"], f"W&B: offline{why}; to send it: wandb sync {got['folder']}")

    def send(self, items: Sequence[Item]) -> None:
        asked = {"do": "log", "items": [asdict(item) for item in items]}
        self._ask(asked, self._config.init_timeout_s)

    def close(self, *, done: bool) -> None:
        asked = {"do": "close", "done": done, "picture": self._picture() if done else None}
        self._ask(asked, self._config.finish_timeout_s)
        process = self._process
        assert process is not None and process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._stop()

    def kill(self) -> None:
        with self._lock:
            self._killed = True
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()  # its own helper process leaves with it

    def _start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, self._log.open("ab") as log:
                if self._killed:
                    raise SinkError("ended before it began")
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=self._run_dir,
                    start_new_session=True,  # Ctrl-C is for training
                )
        except OSError as error:
            raise SinkError(f"cannot start ({error})") from error

    def _ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The answer to a request; without one in `limit` seconds the process is killed."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
            ready = select.select([process.stdout], [], [], limit)[0]
            if not ready:
                self._stop()
                raise SinkError(f"no answer in {limit:g} s")
            line = process.stdout.readline()
        except OSError as error:
            raise SinkError(f"its process has gone, see {self._log}") from error
        if not line:
            raise SinkError(f"its process has gone, see {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            self._stop()
            raise SinkError(answer["error"])
        return answer

    def _picture(self) -> str | None:
        """The metrics drawn; None when there is nothing to draw, or no place."""
        from trainer.plot import draw, load_curves

        picture = self._run_dir / "plots" / "metrics.png"
        try:
            draw([load_curves(self._run_dir)], picture)
        except (ValueError, OSError):
            return None
        return str(picture)

    def _environment(self) -> Any:
        """Versions, command and git state at submission."""
        file = self._run_dir / "env.json"
        return json.loads(file.read_text()) if file.exists() else None


def wandb_id(run_dir: Path) -> str:
    """The W&B run's identity over all attempts: name and id, since an id alone can come again
    (those of a sweep's points are numbers). W&B takes ID_LENGTH characters."""
    full = f"{run_dir.parent.name}-{run_dir.name}"
    if len(full) <= ID_LENGTH:
        return full
    return f"{full[: ID_LENGTH - 9]}-{sha256(full.encode()).hexdigest()[:8]}"


def has_account(environ: Mapping[str, str]) -> bool:
    """Whether `wandb login` was done here, or the environment names credentials."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        file = environ.get("NETRC") or str(Path("~/.netrc").expanduser())
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return False
