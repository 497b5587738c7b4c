"""`dsv41 checkpoint`, called as the command calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launcher import tools
from launcher.own_packages import HOME
from launcher.run_dir import RunFolder
from trainer.checkpoint.store import Checkpoints
from trainer.exit_codes import ExitCode
from trainer.ranks import Ranks
from trainer.state import TrainState

Call = Callable[..., tuple[int, str, str]]
MESH = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "ep": 1, "engram_owners": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 2, 4 and 6."""
    (tmp_path / "config.yaml").write_text("name: x\n")
    store = Checkpoints(
        tmp_path / "checkpoints", keep=9, attempt=1, ranks=Ranks(), say=lambda text: None
    )
    for step in (2, 4, 6):
        tensors = {"model/a": torch.full((50, 10), float(step))}
        store.save(tensors, TrainState(0, 1, "d", "p", step=step, mesh=MESH))
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def called(*words: object) -> tuple[int, str, str]:
        code = tools.main(["checkpoint", *map(str, words)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return called


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def steps(run: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").iterdir())


def test_list_tells_what_there_is(run: Path, call: Call) -> None:
    code, out, err = call("list", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [f"step_0000000{n}" for n in (2, 4, 6)]
    assert all("1 MB  whole  parallel.dp_replicate=1 parallel.dp_shard=1" in line for line in lines)


def test_list_reads_no_contents_and_verify_does(run: Path, call: Call) -> None:
    flip(folder(run, 4) / "__0_0.distcp")
    code, out, _ = call("list", run)
    assert code == 0 and out.count("whole") == 3
    code, out, _ = call("verify", run)
    assert code == ExitCode.BAD_DATA
    assert out.count("whole (verified)") == 2
    assert f"{folder(run, 4) / '__0_0.distcp'} has changed since it was written" in out


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("__0_0.distcp", lambda p: p.write_bytes(p.read_bytes()[:-9]), "bytes, not"),
        (".metadata", Path.unlink, "is missing"),
        ("manifest.json", Path.unlink, "is missing"),
        ("manifest.json", lambda p: p.write_text("{"), "cannot be read"),
        ("trainer.json", lambda p: p.write_text("{}"), "bytes, not"),
    ],
)
def test_what_list_sees_without_reading(
    run: Path, call: Call, file: str, spoil: Callable[[Path], object], message: str
) -> None:
    path = folder(run, 6) / file
    spoil(path)
    code, out, _ = call("list", run, "--json")
    assert code == 0
    found = json.loads(out)["checkpoints"][-1]
    assert found["state"] == "damaged" and not found["verified"]
    (problem,) = found["problems"]
    assert str(path) in problem and message in problem
    assert call("verify", folder(run, 6))[0] == ExitCode.BAD_DATA
    assert call("verify", folder(run, 4))[0] == 0


def test_json_is_one_object(run: Path, call: Call) -> None:
    code, out, _ = call("verify", "--json", run / "checkpoints")
    document = json.loads(out)
    assert code == document["exit_code"] == 0
    assert [entry["step"] for entry in document["checkpoints"]] == [2, 4, 6]
    for entry in document["checkpoints"]:
        assert entry["verified"] and entry["mesh"] == MESH and entry["problems"] == []
        files = list(Path(entry["path"]).iterdir())
        assert entry["bytes"] == sum(f.stat().st_size for f in files)


def test_unfinished_saves_and_those_set_aside_are_listed(run: Path, call: Call) -> None:
    folder(run, 2).rename(run / "checkpoints" / "step_00000002.damaged-003")
    (run / "checkpoints" / "step_00000008.tmp-002").mkdir()
    code, out, _ = call("list", run)
    last = out.splitlines()[2:]
    assert code == 0 and len(last) == 2
    assert "set aside" in last[0] and "unfinished" in last[1]
    assert call("verify", run)[0] == 0  # what is set aside cannot be resumed from


def test_prune_keeps_the_newest_whole_ones(run: Path, call: Call) -> None:
    code, out, _ = call("prune", run, "--keep", 1, "--dry-run")
    assert code == 0 and out.count("would be removed: ") == 2 and steps(run) == [2, 4, 6]
    (run / "checkpoints" / "step_00000008.tmp-002").mkdir()
    code, out, _ = call("prune", run, "--keep", 2)
    assert code == 0 and steps(run) == [4, 6]
    assert "removed: step_00000002 " in out and "removed: step_00000008.tmp-002 " in out
    assert "kept: step_00000006 " in out


def test_prune_never_removes_the_last_whole_one(run: Path, call: Call) -> None:
    flip(folder(run, 6) / "__0_0.distcp")
    flip(folder(run, 4) / ".metadata")
    code, out, _ = call("prune", run, "--keep", 1, "--json")
    assert code == ExitCode.BAD_DATA and steps(run) == [2, 4, 6]
    document = json.loads(out)
    assert [e["step"] for e in document["kept"]] == [2] and document["removed"] == []
    assert [e["step"] for e in document["damaged"]] == [6, 4]


def test_prune_leaves_a_run_alone_that_is_worked_on(run: Path, call: Call) -> None:
    with RunFolder(run).held() as ours:
        assert ours
        for where in (run, run / "checkpoints"):
            code, _, err = call("prune", where, "--keep", 1)
            assert code == ExitCode.CONFIG and "another process is working on" in err
        assert call("list", run)[0] == call("verify", run)[0] == 0
    assert steps(run) == [2, 4, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "nowhere"], "nowhere is no run's folder, nor a folder of checkpoints"),
        (["list", "."], ". is no run's folder, nor a folder of checkpoints, and runs does not"),
        (["verify", "empty"], "holds no checkpoint to verify"),
        (["prune", "empty"], "--keep N belongs to prune"),
        (["list", "empty", "--keep", "3"], "--keep N belongs to prune"),
        (["list", "empty", "--dry-run"], "--dry-run belongs to prune"),
        (["prune", "empty", "--keep", "0"], "--keep=0 must be 1 or more"),
        (["prune", "some/checkpoints/step_00000001", "--keep", "1"], "is one checkpoint"),
    ],
)
def test_what_cannot_be_meant(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "some" / "checkpoints" / "step_00000001").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*words)
    assert code == ExitCode.USAGE and out == ""
    assert message in err


def test_a_run_goes_by_its_name(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "runs" / "tiny" / "7")
    for name in ("attempts", "checkpoints"):
        (run.path / name).mkdir(parents=True)
    run.config_file.write_text("")
    assert call("list", "tiny", "--runs-dir", tmp_path / "runs")[0] == 0
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny/7", "7", "runs/tiny"):
        assert call("list", name) == (0, "runs/tiny/7 has no checkpoint yet\n", "")


def test_a_run_without_checkpoints_is_no_error(tmp_path: Path, call: Call) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert call("list", tmp_path) == (0, f"{tmp_path} has no checkpoint yet\n", "")


def test_it_needs_no_torch(run: Path) -> None:
    program = f"""
import sys
from launcher import tools
assert tools.main(["checkpoint", "verify", {str(run)!r}]) == 0
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
