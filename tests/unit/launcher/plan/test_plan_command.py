"""`dsv41 plan`: what it prints, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from launcher import tools
from launcher.problems import ConfigProblems
from launcher.validate import validate
from trainer.exit_codes import ExitCode

PRETRAIN = ("plan", "+experiment=flash_pretrain")


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert tools.main([*words]) == code
    told = capsys.readouterr()
    return told.out, told.err


def test_the_figures_of_pretraining(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = planned(capsys, *PRETRAIN, "--json")
    assert err == ""
    plan = json.loads(out)
    mesh = plan["mesh"]
    assert mesh["ranks"] == mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] == 512
    assert mesh["experts_of_a_rank"] * mesh["ep"] == 384
    assert mesh["engram_owners"] * mesh["engram_replicas"] == 512
    assert plan["parameters"]["model"] == 552_366_072_944
    assert plan["parameters"]["engram_tables"] == (384_006_168 + 384_016_682) * 256
    step = plan["step"]
    assert step["tokens"] == 1536 * 65536 == step["tokens_of_a_rank"] * 512
    rank = plan["rank"]
    # Muon and Sinkhorn keep one momentum, AdamW for the vectors two moments.
    assert rank["parameters"]["max"] <= rank["optimiser"]["max"] < 1.01 * rank["parameters"]["max"]
    assert sum(c["max"] for c in rank.values()) >= plan["device"]["max"]
    assert plan["device"]["memory"] is None
    values = plan["parameters"]["total"]
    assert 2 * 4 * values < plan["checkpoint"]["bytes"] < 1.001 * 2 * 4 * values
    assert all(c["mean"] <= c["max"] <= 1.05 * c["mean"] for c in rank.values())


def test_fine_tuning_keeps_its_tables_in_files(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(planned(capsys, "plan", "+experiment=flash_sft", "--json")[0])
    assert "Engram rows" not in plan["rank"]
    assert plan["rank"]["optimiser"]["max"] > 1.9 * plan["rank"]["gradients"]["max"]
    assert plan["rank"]["gradients"]["max"] < plan["rank"]["parameters"]["max"]  # frozen indexer


def test_tables_in_host_memory_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "+experiment=tiny", "model.engram.store=host", "--json")
    plan = json.loads(planned(capsys, *words)[0])
    rows = plan["rank"]["Engram rows"]
    assert rows["memory"] == "host" and rows["max"] == (120_754 + 121_928) * 16 * 4
    on_device = [c["max"] for c in plan["rank"].values() if c["memory"] == "device"]
    assert plan["device"]["max"] == sum(on_device)
    assert plan["host"]["max"] == rows["max"] + plan["rank"]["Engram optimiser"]["max"]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = planned(capsys, *PRETRAIN, "cluster.device_memory_gb=141")
    assert err == ""
    assert "dp_replicate 1 x dp_shard 64 x cp 8; 512 share one copy" in out
    assert re.search(r"parameters\s+4\.55 GB\s+4\.55 GB", out)
    assert re.search(r"on a device .* of 141\.00 GB", out)
    assert re.search(r"master copies\s+0\s+0\s+none: all of these are fp32", out)
    assert "Not counted:" in out
    assert "\x1b" not in out and "─" not in out  # no terminal: plain


@pytest.mark.parametrize(
    ("words", "part", "fix"),
    [
        ((), "layers' inputs", "a larger parallel.cp"),
        (("parallel.engram_owners=8",), "Engram rows", "a larger parallel.engram_owners"),
        (("parallel.dp_shard=8", "parallel.ep=8"), "optimiser", "a larger parallel.dp_shard"),
    ],
)
def test_too_little_memory_is_refused_with_the_part_and_the_fix(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str, fix: str
) -> None:
    memory = "cluster.device_memory_gb=24"
    out, err = planned(capsys, *PRETRAIN, memory, *words, code=ExitCode.CONFIG)
    assert "bytes per rank" in out  # the table all the same
    assert "cluster.device_memory_gb=24, but rank 0 would hold" in err
    assert f"is {part}; use {fix}" in err


def test_all_mistakes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallel.ep=48", "parallel.engram_owners=7", "parallel.dp_shrad=2", "train.steps=0")
    out, err = planned(capsys, *PRETRAIN, *words, code=ExitCode.CONFIG)
    assert out == ""
    assert "parallel.dp_shrad" in err
    out, err = planned(capsys, *PRETRAIN, *words[:2], words[3], code=ExitCode.CONFIG)
    assert "parallel.ep=48 does not divide parallel.dp_shard=64" in err
    assert "parallel.engram_owners=7 does not divide the 512 ranks" in err
    assert "train.steps=0" in err


def test_a_run_that_cannot_fit_is_refused_before_it_starts(composed: Callable) -> None:
    cfg = composed("+experiment=tiny", "cluster.device_memory_gb=0.1")
    with pytest.raises(ConfigProblems) as caught:
        validate(cfg, environ={})
    (told,) = caught.value.problems
    assert told.startswith("cluster.device_memory_gb=0.1, but rank 0 would hold")
    validate(composed("+experiment=tiny", "cluster.device_memory_gb=80"), environ={})
    with pytest.raises(ConfigProblems, match="device_memory_gb=-1"):
        validate(composed("+experiment=tiny", "cluster.device_memory_gb=-1"), environ={})
