"""The batch script, and what is refused before Slurm is asked."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig

import slurm
from launcher.backends.slurm.config import SlurmConfig, seconds
from launcher.backends.slurm.queue import preview
from launcher.backends.slurm.script import array_script, ranges, run_script
from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
from launcher.validate import validate

Composed = Callable[..., DictConfig]
SITES = sorted((Path(slurm.__file__).parent / "sites" / "launcher").glob("*.yaml"))
JOB = ("+experiment=tiny", "launcher=slurm", "parallel.dp_shard=4", "train.packs_per_step=4")
NODES = "launcher.nodes=2"


def directives(script: str) -> list[str]:
    return [x.removeprefix("#SBATCH ") for x in script.splitlines() if x.startswith("#SBATCH")]


def job(composed: Composed, *words: str) -> RunConfig:
    return validate(composed(*JOB, NODES, *words), environ={})


def test_the_script_asks_for_what_the_settings_say(composed: Composed) -> None:
    config = job(
        composed,
        *("name=mine", "launcher.slurm.partition=gpu", "launcher.slurm.account=me"),
        *("launcher.slurm.qos=high", "launcher.slurm.constraint='a100&ib'"),
        *("resilience.grace_s=99.5", "launcher.slurm.time=1-12:00:00"),
        *("launcher.slurm.gpus_per_node=2", "launcher.slurm.cpus_per_task=6"),
        "launcher.slurm.extra=[--exclusive]",
        "launcher.slurm.setup=['module load cuda','export A=b']",
    )
    script = run_script(config, Path("/shared/runs/50% off/7"))
    assert set(directives(script)) == {
        "--job-name=dsv41-mine",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--constraint=a100&ib",
        "--time=1-12:00:00",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=6",
        "--gpus-per-node=2",
        "--requeue",
        "--signal=USR2@115",
        '--output="/shared/runs/50%% off/7/slurm-%j.log"',
        "--open-mode=append",
        "--exclusive",
    }
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines.index("module load cuda") + 1 == lines.index("export A=b")
    assert lines.index("export A=b") < lines.index("run='/shared/runs/50% off/7'")
    assert 'export PYTHONSAFEPATH=1 PYTHONPATH="$run/code"' in lines
    assert lines[-1].endswith(' -P -m launcher.backends.slurm.job "$run" "$SLURM_JOB_ID"')
    assert "{{" not in script


def test_an_array_is_a_task_for_each_point_that_finds_its_own_run(composed: Composed) -> None:
    folder = Path("/shared/runs/50% off")
    script = array_script(job(composed), folder, [0, 1, 2, 7], digits=3, limit=2)
    assert {"--array=0-2,7%2", '--output="/shared/runs/50%% off/%3a/slurm-%A_%a.log"'} < set(
        directives(script)
    )
    lines = script[script.index("run=") :].splitlines()
    words = lines[-1].partition("slurm.job ")[2]
    shown = "\n".join([*lines[:2], f'printf "%s\\n" "$PYTHONPATH" {words}'])
    task = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "7", "SLURM_JOB_ID": "15"}
    told = subprocess.run(["bash", "-c", shown], env=task, stdout=subprocess.PIPE, check=True)
    run = f"{folder}/007"
    assert told.stdout.decode().splitlines() == [f"{run}/code", run, "12_7"]
    assert "--array=0" in directives(array_script(job(composed), folder, [0], digits=3, limit=None))


def test_numbers_as_array_takes_them() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranges([3]) == "3"


def test_what_slurm_is_to_choose_is_left_out_and_bash_reads_the_rest(composed: Composed) -> None:
    script = preview(job(composed))
    assert [d.partition("=")[0] for d in directives(script)] == [
        "--job-name",
        "--nodes",
        "--ntasks-per-node",
        "--requeue",
        "--signal",
        "--output",
        "--open-mode",
    ]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launcher.slurm.time=soon"], "launcher.slurm.time=soon is no time that Slurm reads"),
        (["launcher.slurm.time=1:00"], "is told to save 75 s before its time ends"),
        (["launcher.slurm.gpus_per_node=1"], "2 ranks share a node"),
        (["launcher.slurm.gpus_per_node=0"], "must be 1 or more, or null"),
        (["launcher.slurm.partition='a b'"], "must be one word without quotes"),
        (["launcher.slurm.extra=[exclusive]"], "must be an option"),
        (["launcher.slurm.extra=['--signal=B:TERM@9']"], "--signal=B:TERM@9 is set by dsv41-train"),
        (["launcher.slurm.extra=[-N3]"], "-N3 is set by dsv41-train"),
        (["launcher.nodes=3"], "which 3 nodes (launcher.nodes) cannot share evenly"),
        (["launcher=torchrun", "launcher.slurm.dry_run=true"], "--dry-run prints the batch script"),
    ],
)
def test_what_is_refused(composed: Composed, words: list[str], told: str) -> None:
    with pytest.raises(ConfigProblems) as raised:
        job(composed, *words)
    assert told in raised.value.message


def test_several_mistakes_are_listed_together() -> None:
    found = SlurmConfig(time="x", cpus_per_task=0, setup=("a\nb",), extra=("--array=1",)).problems()
    assert len(found) == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:01:30", 7290),
        ("1-2", 93600),
        ("1-2:03", 93780),
        ("1-2:03:04", 93784),
        ("1h", None),
        ("", None),
        ("1:2:3:4", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, value: int | None) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("site", SITES, ids=lambda p: p.stem)
def test_the_sites_are_settings_of_this_version(composed: Composed, site: Path) -> None:
    from omegaconf import OmegaConf

    cfg = composed(
        "+experiment=tiny", "launcher=slurm", "parallel.dp_shard=16", "train.packs_per_step=16"
    )
    given = OmegaConf.load(site)
    assert isinstance(given, DictConfig)
    del given["defaults"]
    cfg.launcher = OmegaConf.merge(cfg.launcher, given)
    config = validate(cfg, environ={})
    slurm_ = config.launcher.slurm
    assert slurm_.gpus_per_node == 8
    assert f"--partition={slurm_.partition}" in directives(preview(config))
    changed = replace(config, launcher=replace(config.launcher, nodes=4))
    assert "--nodes=4" in directives(preview(changed))
