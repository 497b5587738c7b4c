"""Which folder a command trains in: a new run's, or that of an unfinished one it continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from launcher import freeze
from launcher.backends.slurm import queue
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import NewRun, RunFolder, create, runs_of, taken
from launcher.submission import given_to_next
from trainer.exit_codes import ExitCode

Say = Callable[[str], None]

# What does not change what a run computes, so that what is given now counts: settings of the data,
# for one attempt, and sections that say how a run is launched, watched and shown.
GIVEN_NOW = ("cache_dir", "processes", "accept_changed")
SECTIONS = ("launcher", "resilience", "logging", "cluster")
# These and settings that say where a run lies and how it is begun.
NOT_COMPARED = frozenset(
    {"id", "resume", "runs_dir", *SECTIONS, *(f"data.{name}" for name in GIVEN_NOW)}
)


def open_run(
    config: RunConfig,
    *,
    overrides: Sequence[str],
    flags: Sequence[str] = (),
    held: ExitStack,
    say: Say,
) -> NewRun | RunFolder:
    """The run to train: one just made, or one to continue; `held` keeps other processes off it.

    resume=never makes a new run. resume=auto continues the run `id`, or without an id the newest
    unfinished run of this name with an equal configuration that no process is working on; if
    there is none it makes a new run and says so. Stop 78 for a given id that cannot be continued.
    """
    folder = named_again(config)
    if folder is not None and not held.enter_context(folder.held()):
        raise Stop(
            ExitCode.CONFIG,
            f"id={config.id}: another process is working on {folder.path}.\n"
            "Wait until it ends, or leave id out to start a new run.",
        )
    if config.resume == "auto" and config.id is None:
        folder = _newest(config, held=held, say=say)
    if folder is not None:
        queue.refuse_second(folder)
        say(f"Continuing {folder.path}, attempt {folder.last_attempt() + 1}.")
        for change in moved(folder, config):
            say(f"  {change}")
        return folder
    if config.resume == "auto":
        what = f"run {config.id}" if config.id else f"unfinished run of {config.name}"
        say(f"resume=auto: no {what} with this configuration in {config.home}; starting a new run.")
    new = create(config, overrides=overrides, flags=flags)
    ours = held.enter_context(new.folder.held())
    assert ours, "a folder that was just made is held by another process"
    return new


def named_again(config: RunConfig) -> RunFolder | None:
    """The run that config.id names; None without an id, or when there is none yet. Stop 78 for one
    that cannot be continued, whoever works on it."""
    if config.id is None or not (config.home / config.id).exists():
        return None
    folder = RunFolder(config.home / config.id)
    if config.resume == "never":
        raise taken(config)
    if not folder.config_file.is_file():
        raise Stop(
            ExitCode.CONFIG,
            f"{folder.path} holds no run (no config.yaml); choose another id, or remove the folder",
        )
    if different := _differences(folder, config):
        lines = "\n".join(f"  {line}" for line in different)
        raise Stop(
            ExitCode.CONFIG,
            f"id={config.id}: the run {folder.path} has another configuration:\n\n{lines}\n\n"
            "Use the same settings to continue it, or leave id out to start a new run.",
        )
    if folder.finished():
        raise Stop(
            ExitCode.CONFIG,
            f"id={config.id}: the run {folder.path} is finished; nothing is left to continue.\n"
            "Leave id out to start a new run.",
        )
    return folder


def given_now(given: RunConfig, *, frozen: RunConfig) -> dict[str, Any]:
    """What of the settings given is not the frozen run's, but its next attempt's: of the data, and
    whole sections that differ. For attempts/NNN/given.json."""
    found: dict[str, Any] = {"data": {name: getattr(given.data, name) for name in GIVEN_NOW}}
    for name in SECTIONS:
        if getattr(given, name) != getattr(frozen, name):
            found[name] = freeze.plain(getattr(given, name))
    return found


def continued(folder: RunFolder, now: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run that goes on: its own, with what `given_now` says."""
    own = freeze.load(folder.config_file)
    parts = {
        name: freeze.section(type(getattr(own, name)), now[name], where=f"{folder.path}: {name}")
        for name in SECTIONS
        if name in now
    }
    return replace(own, data=replace(own.data, **now.get("data", {})), **parts)


def as_last(folder: RunFolder) -> RunConfig:
    """The configuration of a run, launched, watched and shown as the last time; before it was begun
    as it was made."""
    given = given_to_next(folder)
    if given is None:
        last = folder.last_attempt()
        given = folder.attempt(last).given() if last else {}
    return continued(folder, {name: given[name] for name in SECTIONS if name in given})


def moved(folder: RunFolder, config: RunConfig) -> list[str]:
    """How `config` launches, watches and shows the run otherwise than the last time."""
    last, found = as_last(folder), list[str]()
    for name in SECTIONS:
        found += freeze.differences(getattr(last, name), getattr(config, name), path=name)
    return found


def _newest(config: RunConfig, *, held: ExitStack, say: Say) -> RunFolder | None:
    for folder in runs_of(config):
        if folder.finished():
            continue
        try:
            different = _differences(folder, config)
        except Stop:
            say(f"{folder.path} was made by another version and is left alone.")
            continue
        if different:
            more = f" and {len(different) - 3} more" if len(different) > 3 else ""
            say(f"{folder.path} is unfinished, but differs: {'; '.join(different[:3])}{more}.")
        elif held.enter_context(folder.held()):
            return folder
        else:
            say(f"{folder.path} is unfinished, but another process is working on it.")
    return None


def _differences(folder: RunFolder, config: RunConfig) -> list[str]:
    return freeze.differences(freeze.load(folder.config_file), config, skip=NOT_COMPARED)
