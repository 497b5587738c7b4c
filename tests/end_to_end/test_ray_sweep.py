"""Sweeps on a real Ray of this machine whose bad points are stopped early."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest

from launcher.processes import alive, descendants
from trainer.exit_codes import ExitCode

pytest.importorskip("ray.tune", reason="Ray Tune is not installed")
pytestmark = pytest.mark.xdist_group("ray")

ASHA = ("-m", "launcher=ray", "sweep.scheduler=asha", "sweep.asha.grace_steps=5")
RATES = ("optim.final_lr=0", "optim.warmup_steps=2", "train.steps=60")


def test_it_is_refused_where_there_is_no_ray(place) -> None:
    ended = place.train(*place.small, *ASHA, "launcher=local", "seed=1,2", "train.steps=x")
    assert ended.code == ExitCode.CONFIG, ended.text
    assert "sweep.scheduler=asha works through Ray Tune, but this is launcher=local" in ended.err
    assert "train.steps=x must be a whole number" in ended.err
    assert place.names() == {"configs", "words.txt"}


@pytest.mark.long
def test_absurd_rates_are_stopped_and_the_good_one_ends(place) -> None:
    ended = place.train(*place.small, *ASHA, *RATES, "optim.lr=3e-3,1e-9,10,1e-8")
    assert ended.code == 0, ended.text
    assert ended.err == ""
    (sweep,) = (place.folder / "runs").iterdir()
    told = json.loads(place.run("dsv41", "sweep", "status", str(sweep), "--json").out)
    assert [point["state"] for point in told] == ["done", "stopped", "stopped", "stopped"]
    assert told[0]["step"] == 60
    for point in told[1:]:
        assert point["reason"] == "stopped early by asha at step 5"
        assert point["step"] < 60
        saved = sweep / point["run"].rpartition("/")[2] / "checkpoints"
        assert (saved / f"step_{point['step']:08d}").is_dir()  # a clean end
    assert ended.out.count("stopped early by asha at step 5") == 6  # then, and in the table
    assert "ray" not in ended.out.replace(str(place.folder), "").replace("launcher=ray", "").lower()
    again = place.run("dsv41", "sweep", "retry", str(sweep))
    assert again.out == "All points are done, stopped early, at work, or in the queue.\n"
    best = json.loads(place.run("dsv41", "sweep", "best", str(sweep), "--json").out)
    assert best["point"] == "optim.lr=0.003"


@pytest.mark.long
def test_ctrl_c_saves_retry_goes_on_and_nothing_outlives_a_killed_sweep(place) -> None:
    process = place.begin(*place.small, *ASHA, *RATES, "train.steps=5000", "optim.lr=3e-3,1e-3")
    place.wait_for(place.metrics, process)
    everyone = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INTERRUPTED, out + err
    _await_end(everyone)
    (sweep,) = (place.folder / "runs").iterdir()
    told = json.loads(place.run("dsv41", "sweep", "status", str(sweep), "--json").out)
    assert [point["state"] for point in told] == ["stopped", "new"]
    assert f"step_{told[0]['step']:08d}" in {saved.name for saved in place.saved()}

    process = place.start(
        [sys.executable, "-P", "-m", "launcher.tools", "sweep", "retry", str(sweep)]
    )
    place.wait_for(lambda: max(place.losses(sweep / "000"), default=0) > told[0]["step"], process)
    everyone = descendants(process.pid)
    process.kill()
    process.communicate()
    _await_end(everyone)


def _await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.1)
