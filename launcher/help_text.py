"""The text of `dsv41-train --help`: every group and its options, in one readable screen.

What a group is for is the first line of the docstring of its package in conf/; what an option is
for is the first comment of its file. So the text cannot drift from the configuration.
"""

from __future__ import annotations

import importlib.resources
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

HEAD = """\
dsv41-train trains DeepSeek-V4.1, with its Engram memory: here, under torchrun, on Ray or Slurm.

  dsv41-train +experiment=tiny                    a small model on built-in text, a few minutes
  dsv41-train +experiment=tiny train.steps=50     the same with one setting changed
  dsv41-train +experiment=tiny optim.lr=1e-3,3e-3 -m     one run for each value
  dsv41-train +experiment=tiny resume=auto        go on where the last one was stopped

Groups: choose an option by GROUP=OPTION, an experiment by +experiment=OPTION.
"""

TAIL = """
Settings outside the groups (all settings with their values: --cfg job):
  name, id, runs_dir   the run's folder is runs_dir/name/id; an id is made from the time
  resume               auto = continue the newest unfinished run with these settings; never
  seed                 of the weights and the order of the packs
  train.*, eval.*      steps, packs a step, clipping, threads; how often to evaluate

Options of the command:
  --config-dir DIR   add a folder of your own groups: DIR/experiment/mine.yaml, beginning with
                     '# @package _global_', then is +experiment=mine
  --dry-run          with launcher=slurm: print the batch script, and stop
  -m, --multirun     one run for each combination of values given as NAME=A,B
  --hydra-help       options of Hydra, which reads the command line

Around it: dsv41 plan (bytes on every rank), doctor (is this machine fit?), runs, status RUN, logs,
stop, resume, plot (loss curves), verify CASE (this installation); dsv41 --help lists them all.
"""


def render() -> str:
    """The whole text, escaped for string.Template, which Hydra passes it through."""
    return (HEAD + "\n".join(_groups()) + "\n" + TAIL).replace("$", "$$")


def _groups() -> Iterator[str]:
    from hydra.core.global_hydra import GlobalHydra

    loader = GlobalHydra.instance().config_loader()
    groups = [g for g in loader.list_groups("") if g != "hydra" and loader.get_group_options(g)]
    groups.sort(key=lambda g: (g != "experiment", g))
    for group in groups:
        yield f"  {group:<12} {_purpose(group)}"
        for option in sorted(loader.get_group_options(group)):
            yield f"    {option:<14} {first_comment(_source(loader, group, option))}"


def _purpose(group: str) -> str:
    try:
        doc = inspect.getdoc(import_module(f"conf.{group}")) or ""
    except ModuleNotFoundError:  # a group of the user's own
        return ""
    return doc.partition("\n")[0]


def _source(loader: Any, group: str, option: str) -> str:
    """The text of the file that an option is read from: the first source that has it."""
    for source in loader.get_sources():
        name = f"{group}/{option}.yaml"
        if source.scheme() == "file" and (file := Path(source.path) / name).is_file():
            return file.read_text("utf-8")
        if source.scheme() == "pkg" and source.path == "conf":
            file = importlib.resources.files("conf").joinpath(name)
            if file.is_file():
                return file.read_text("utf-8")
    return ""


def first_comment(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ")
    return ""
