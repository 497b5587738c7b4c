"""The W&B view as a process: what reaches wandb, and that wandb can do what it likes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.tracking.config import Mode, WandbConfig
from trainer.tracking.tracker import Tracker
from trainer.tracking.views import Views
from trainer.tracking.wandb_sink import PROGRAM, WandbSink, wandb_id

Log = Callable[[], list[dict[str, Any]]]


def run_folder(folder: Path) -> Path:
    run = folder / "mine" / "run-1"
    (run / "code" / "model").mkdir(parents=True)
    (run / "code" / "model" / "a.py").write_text("a = 1\n")
    (run / "env.json").write_text('{"git": {"commit": "c0ffee"}}')
    return run


def shown(
    run: Path, *, mode: Mode, done: bool = True, limit: float = 30.0, **settings: Any
) -> list[str]:
    """What a run of two logged steps says with W&B."""
    said: list[str] = []
    config = WandbConfig(mode=mode, init_timeout_s=limit, finish_timeout_s=limit, **settings)
    sink = WandbSink(
        config,
        mode=mode,
        run_dir=run,
        log=run / "attempts" / "001" / "wandb.log",
        settings={"optim": {"lr": 0.1}, "clip": float("inf")},
    )
    tracker = Tracker(sink, history=run / "metrics.jsonl", last_step=0)
    views = Views([tracker], say=said.append, patience=60)
    for step in (1, 2):
        views.show({"step": step, "loss": 1.0 / step})
    views.show_samples(2, [("once", "upon")])
    views.close(done=done)
    return [text for text in said if not text.startswith("waiting")]


def test_what_w_and_b_is_told(tmp_path: Path, fake_wandb: Log) -> None:
    run = run_folder(tmp_path)
    said = shown(run, mode="online", project="p", tags=("a", "b"), group="sweep")
    assert said == ["W&B: https://wandb.test/it"]
    init, _, config, *rest = fake_wandb()
    assert init == {
        "place": "init",
        "mode": "online",
        "id": "mine-run-1",
        "name": "mine run-1",
        "project": "p",
        "entity": None,
        "group": "sweep",
        "tags": ["a", "b"],
        "resume": "allow",
    }
    assert config["config"]["optim"] == {"lr": 0.1}
    assert config["config"]["environment"] == {"git": {"commit": "c0ffee"}}
    logged = [(entry["step"], entry["values"]) for entry in rest if entry["place"] == "log"]
    assert logged == [
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5}),
        (2, {"samples": [[2, "once", "upon"]]}),
    ]
    assert rest[-1] == {"place": "finish", "exit_code": 0}
    assert "noise of wandb" in (run / "attempts" / "001" / "wandb.log").read_text()


@pytest.mark.parametrize(
    ("fault", "mode", "why"),
    [
        ("raise init", "offline", "no init today"),
        ("raise log", "offline", "no log today"),
        ("raise finish", "offline", "no finish today"),
        ("sleep init", "offline", "no answer in 5 s"),
        pytest.param("sleep log", "offline", "no answer in 5 s", marks=pytest.mark.slow),
        pytest.param("sleep finish", "offline", "no answer in 5 s", marks=pytest.mark.slow),
        ("die log", "offline", "its process has gone, see "),
    ],
)
def test_one_line_says_what_went_wrong(
    tmp_path: Path,
    fake_wandb: Log,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    mode: Mode,
    why: str,
) -> None:
    monkeypatch.setenv("FAKE_WANDB", fault)
    started = time.monotonic()
    limit = 5.0 if fault.startswith("sleep") else 30.0  # the others answer, however slow the host
    said = shown(run_folder(tmp_path), mode=mode, limit=limit)
    assert time.monotonic() - started < limit + 15
    assert said[-1].startswith(f"W&B: {why}")
    assert said[-1].endswith("; training goes on without it")
    assert len(said) == (1 if fault.endswith("init") else 2)


@pytest.mark.parametrize(
    ("how", "why"), [("raise", "no init online today"), ("sleep", "no answer")]
)
def test_without_an_answer_from_the_server_a_folder_is_written(
    tmp_path: Path, fake_wandb: Log, monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    monkeypatch.setenv("FAKE_WANDB", f"{how} init online")
    run = run_folder(tmp_path)
    (said,) = shown(run, mode="online", limit=10.0)
    folder = run / "wandb" / "offline-run-x"
    assert said.startswith(f"W&B: offline ({why}")
    assert said.endswith(f"; to send it: wandb sync {folder}")
    assert [e["step"] for e in fake_wandb() if e["place"] == "log"] == [1, 2, 2]


def test_steps_that_an_earlier_attempt_sent_are_not_sent_again(
    tmp_path: Path, fake_wandb: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB_STEP", "2")
    shown(run_folder(tmp_path), mode="online", done=False)
    assert [e["step"] for e in fake_wandb() if e["place"] == "log"] == [2, 2]
    assert fake_wandb()[-1] == {"place": "finish", "exit_code": 1}


def test_runs_of_different_sweeps_do_not_share_an_identity() -> None:
    assert wandb_id(Path("runs/a-sweep-1/001")) == "a-sweep-1-001"
    long = [wandb_id(Path(f"runs/{'n' * 100}/{number:03d}")) for number in (1, 2)]
    assert [len(name) for name in long] == [64, 64]
    assert long[0] != long[1]


STARTER = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-P", {str(PROGRAM)!r}], stdin=subprocess.PIPE,
                         start_new_session=True)
child.stdin.write(sys.argv[1].encode() + b"\\n")
child.stdin.flush()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_leaves_when_the_rank_is_killed(
    tmp_path: Path, fake_wandb: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "sleep init")
    names = ["id", "name", "project", "entity", "group", "tags", "init_timeout_s"]
    asked = {"do": "open", "mode": "offline", "dir": str(tmp_path), **dict.fromkeys(names)}
    rank = subprocess.Popen(
        [sys.executable, "-c", STARTER, json.dumps(asked)], stdout=subprocess.PIPE
    )
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    rank.send_signal(signal.SIGKILL)
    rank.communicate()
    deadline = time.monotonic() + 15
    while alive(child):
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_w_and_b_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself: a folder inside the run's that holds everything and no secret."""
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    secret = "5ec2e7" * 6 + "abcd"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    run = run_folder(tmp_path)
    (said,) = shown(run, mode="offline", limit=60.0)
    (folder,) = (run / "wandb").glob("offline-run-*-mine-run-1")
    assert said == f"W&B: offline; to send it: wandb sync {folder}"
    written = (folder / "run-mine-run-1.wandb").read_bytes()
    for text in (b"c0ffee", b"loss", b"code-mine-run-1", b"samples"):
        assert text in written
    (table,) = (folder / "files/media/table").iterdir()
    assert "upon" in table.read_text()
    for file in run.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
