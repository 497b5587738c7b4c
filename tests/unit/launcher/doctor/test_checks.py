"""Each check finds what is wrong, names it and its fix, and none ever hangs."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import socket
import stat
import time
from collections import namedtuple
from pathlib import Path

import pytest

from launcher.backends.ray.config import RayConfig
from launcher.doctor import folders, installation, limits, network
from launcher.doctor.check import Check, Finding, carried_out, output_of
from model.kernels.build import built

OK = Finding("ok", "fine")


def test_a_check_that_hangs_or_breaks_hides_no_other() -> None:
    def breaks() -> Finding:
        raise RuntimeError("oh")

    def hangs() -> Finding:
        time.sleep(30)
        return OK

    began = time.monotonic()
    found = dict(
        carried_out(
            [
                Check("hangs", hangs, 0.3, late="warn", late_fix="wake it"),
                Check("hangs too", hangs, 0.4),
                Check("breaks", breaks),
                Check("works", lambda: OK),
            ]
        )
    )
    assert time.monotonic() - began < 10
    assert list(found) == ["hangs", "hangs too", "breaks", "works"]
    assert found["hangs"] == Finding("warn", "no answer in 0.3 s", "wake it")
    assert found["hangs too"].level == "fail"
    assert found["breaks"].level == "fail" and "RuntimeError: oh" in found["breaks"].found
    assert found["works"] == OK


def test_a_command_that_hangs_or_fails_says_nothing() -> None:
    assert output_of(["echo", "here"], timeout_s=10) == "here\n"
    assert output_of(["sleep", "30"], timeout_s=0.2) is None
    assert output_of(["false"], timeout_s=10) is None
    assert output_of(["no-such-command"], timeout_s=10) is None


def test_the_kernels_are_compiled_or_what_they_lack_is_said(monkeypatch) -> None:
    if shutil.which("gcc"):
        found = installation.kernels()
        assert found.level == "ok" and found.found.endswith(f".so, by {shutil.which('gcc')}")
    built.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    found = installation.kernels()
    built.cache_clear()
    assert found.level == "warn" and found.found.startswith("no C compiler")
    assert "install gcc" in found.fix


def test_a_folder_that_does_what_runs_need(tmp_path: Path) -> None:
    found = folders.works(tmp_path / "runs" / "deeper")
    assert found.level == "ok" and "other nodes must see the same folder" in found.found
    assert folders.clock(tmp_path).level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_below_a_file_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = folders.works(tmp_path / "file")
    assert found.level == "fail" and "making a folder in it failed" in found.found
    assert "runs_dir=FOLDER" in found.fix


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [
        (os, "fsync", "writing and syncing a file"),
        (Path, "rename", "renaming over a file"),
        (fcntl, "flock", "locking"),
    ],
)
def test_what_a_folder_cannot_do_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, step: str
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(owner, name, refuse)
    found = folders.works(tmp_path)
    assert found.level == "fail"
    assert f"{step} failed: Operation not supported" in found.found
    assert ("-o flock" in found.fix) == (step == "locking")
    assert list(tmp_path.iterdir()) == []


def test_locks_that_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    found = folders.works(tmp_path)
    assert found.level == "fail" and "two processes can lock it at once" in found.found


def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 120)
    found = folders.clock(tmp_path)
    assert found.level == "warn" and "120.0 s apart" in found.found


def test_room_is_compared_with_what_checkpoints_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = folders.room(tmp_path / "runs", needed=1000, why="3 checkpoints of tiny")
    assert enough.level == "ok" and "3 checkpoints of tiny take 1 MB" in enough.found
    short = folders.room(tmp_path, needed=10**18, why="3 checkpoints of big")
    assert short.level == "fail" and "checkpoint.keep" in short.fix
    usage = shutil.disk_usage(tmp_path)._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert folders.room(tmp_path, needed=None).level == "warn"


def test_caches_are_named_by_their_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    good = {"TMPDIR": tmp_path, "HF_HOME": tmp_path / "not" / "there"}
    assert folders.caches(good).level == "ok"
    found = folders.caches({**good, "data.cache_dir": tmp_path / "file"})
    assert found.level == "fail" and found.fix.endswith("data.cache_dir")
    places = folders.cache_folders({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/c"}, data=Path("/d"))
    assert places["HF_HOME"] == Path("/hf") and places["data.cache_dir"] == Path("/d")


@pytest.mark.parametrize(
    ("look", "limit", "hint"),
    [
        (limits.open_files, resource.RLIMIT_NOFILE, "ulimit -n 4096"),
        (limits.processes, resource.RLIMIT_NPROC, "ulimit -u 4096"),
        (lambda: limits.locked_memory(needed=True), resource.RLIMIT_MEMLOCK, "ulimit -l"),
    ],
)
def test_low_limits(monkeypatch: pytest.MonkeyPatch, look, limit: int, hint: str) -> None:
    given = {limit: (256, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: given[which])
    found = look()
    assert found.level == "warn" and hint in found.fix
    given[limit] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert look().level == "ok"


def test_locked_memory_matters_to_pinned_tables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert limits.locked_memory(needed=False).level == "ok"


def test_a_containers_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = limits.shared_memory()
    assert found.level == "warn" and "--shm-size" in found.fix


@pytest.mark.parametrize(("nodes", "level"), [(1, "warn"), (2, "fail")])
def test_a_name_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch, nodes: int, level: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    found = network.host_name(nodes=nodes)
    assert found.level == level and "nowhere.invalid does not resolve" in found.found
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    found = network.host_name(nodes=nodes)
    assert found.level == level and "only this machine reaches" in found.found


def test_a_port_that_is_taken() -> None:
    assert network.port(None).level == "ok"
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        found = network.port(taken)
    assert found.level == "fail" and f"port {taken} cannot be used" in found.found
    assert "null" in found.fix


def test_services_that_answer_and_that_do_not(answering) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        assert network.wandb(f"http://{place}").level == "ok"
    with answering(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as head:
        for address in (head, f"ray://{head}"):
            assert network.ray(None, variable=address).level == "ok"
        assert network.ray(RayConfig(head), variable="nowhere:1").level == "ok"
    with answering(b"HTTP/1.1 400 Bad Request\r\n") as other:
        assert "something else than Ray" in network.ray(None, variable=other).found
    offline = network.wandb(f"http://{place}")
    assert offline.level == "warn" and "refused" in offline.found and "wandb sync" in offline.fix
    lost = network.ray(None, variable=place)
    assert lost.level == "warn" and "ray start --head" in lost.fix
    for variable in (None, "auto"):
        assert network.ray(None, variable=variable).level == "ok"


def test_the_cluster_that_a_run_needs() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{server.getsockname()[1]}"
    lost = network.ray(RayConfig(place), variable=None)
    assert lost.level == "fail" and lost.found.startswith(f"{place}: ")
    assert "correct launcher.ray.address; null starts one here" in lost.fix
    stray = network.ray(RayConfig("no.such.host.invalid:6379"), variable=None)
    assert stray.level == "fail" and "no.such.host.invalid:6379: " in stray.found
    assert network.ray(RayConfig(), variable=place).level == "ok"  # one of its own
    assert network.ray(RayConfig("auto"), variable=place).level == "fail"
    assert network.ray(RayConfig("auto"), variable=None).level == "ok"


def tool(folder: Path, name: str, text: str = "") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755 | stat.S_IXUSR)


def test_slurm_whole_half_silent_and_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert network.slurm(needed=False).level == "ok"
    assert network.slurm(needed=True).level == "fail"
    tool(tmp_path, "sbatch")
    half = network.slurm(needed=False)
    assert half.level == "warn" and half.found == "missing: srun, squeue, scontrol"
    for name in network.SLURM:
        tool(tmp_path, name)
    assert "gets no answer" in network.slurm(needed=True).found
    tool(tmp_path, "sinfo", 'echo "high up 2"; echo "low  down 9"')
    whole = network.slurm(needed=True)
    assert whole.level == "ok" and "high up 2, low down 9" in whole.found


def test_versions_are_held_against_our_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["packaging>=1", "packaging<2", "no-such-package", "nope; sys_platform == 'vms'"]
    monkeypatch.setattr(installation.metadata, "requires", lambda _: needs)
    found = installation.versions()
    assert found.level == "fail"
    assert "no-such-package is missing" in found.found and "is not <2" in found.found
    assert "nope" not in found.found and "packaging is missing" not in found.found
