"""The process that speaks to Weights & Biases, so that whatever W&B does can be ended.

Started by its path, it imports nothing of ours: only wandb. Reads one JSON request a line from
standard input and answers each with one line on what was standard output; all that wandb prints
goes to standard error. When standard input ends early, or the process that started this one has
gone, it closes the W&B run as failed and leaves within PATIENCE seconds.
"""

from __future__ import annotations

import json
import os
import queue
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

PATIENCE = 3.0
MOST = 150  # letters of an error
Request = dict[str, Any]


class Session:
    """One attempt's part of the W&B run."""

    def __init__(self) -> None:
        self.run: Any = None

    def open(self, ask: Request) -> Request:
        """Begin the run, or go on with it."""
        import wandb

        self.run = self._init(wandb, ask)
        self.run.config.update(ask["config"], allow_val_change=True)
        self._log_code(wandb, ask)
        if ask["mode"] == "offline":  # each attempt makes a folder: the newest is to have all
            return {"after": 0, "folder": str(Path(self.run.dir).parent)}
        return {"after": max(0, self.run.starting_step - 1), "url": self.run.url}

    def log(self, ask: Request) -> Request:
        import wandb

        for item in ask["items"]:
            values = dict(item["values"])
            if item["texts"]:
                rows: list[Any] = [[item["step"], *pair] for pair in item["texts"]]
                values["samples"] = wandb.Table(columns=["step", "prompt", "text"], data=rows)
            self.run.log(values, step=item["step"])
        return {}

    def close(self, ask: Request) -> Request:
        import wandb

        if ask["picture"]:
            self.run.log({"metrics": wandb.Image(ask["picture"])})
        self.run.finish(exit_code=0 if ask["done"] else 1)
        self.run = None
        return {}

    def _init(self, wandb: Any, ask: Request) -> Any:
        return wandb.init(
            id=ask["id"],
            name=ask["name"],
            project=ask["project"],
            entity=ask["entity"],
            group=ask["group"],
            tags=ask["tags"],
            dir=ask["dir"],
            resume="allow",
            mode=ask["mode"],
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,  # env.json has the state at submission, which is what counts
                disable_code=True,
                init_timeout=ask["init_timeout_s"],
            ),
        )

    def _log_code(self, wandb: Any, ask: Request) -> None:
        """The snapshot; the same content is one version, however many attempts log it."""
        if ask["code"]:
            code = wandb.Artifact(f"code-{ask['id']}", type="code")
            code.add_dir(ask["code"], skip_cache=True, policy="immutable")
            self.run.log_artifact(code)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; a server may have answered with a page of HTML."""
    lines = str(error).strip().splitlines()
    return lines[0][:MOST] if lines else type(error).__name__


def main() -> int:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed must not read as a reply
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    threading.Thread(target=read, args=(requests, os.getppid()), daemon=True).start()
    session = Session()
    while (ask := requests.get()) is not None:
        try:
            answer = getattr(session, ask["do"])(ask)
        except Exception as error:
            print(f"{ask['do']}: {error!r}", file=sys.stderr, flush=True)
            answer = {"error": first_line(error)}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
    if session.run is not None:
        session.run.finish(exit_code=1)
    return 0


def read(requests: queue.SimpleQueue[Request | None], parent: int) -> None:
    """Pass requests on until there are no more; then this process may live PATIENCE longer."""
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            requests.put(json.loads(line))
    requests.put(None)
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
