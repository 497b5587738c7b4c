"""Which folder a command trains in: a new run's, or that of an unfinished one it continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from launcher import freeze
from launcher.problems import Stop
from launcher.run_config import RunConfig
from launcher.run_dir import NewRun, RunFolder, create, runs_of, taken
from trainer.exit_codes import ExitCode

Say = Callable[[str], None]

# Settings of the data that do not change what a run computes: those given now count.
GIVEN_NOW = ("cache_dir", "processes", "accept_changed")
# These and settings that say where a run lies and how it is started.
NOT_COMPARED = frozenset({"id", "resume", "runs_dir", *(f"data.{name}" for name in GIVEN_NOW)})


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
    folder = None
    if config.id is not None and RunFolder(config.home / config.id).path.exists():
        folder = _given(config, held=held)
    elif config.resume == "auto" and config.id is None:
        folder = _newest(config, held=held, say=say)
    if folder is not None:
        say(f"Continuing {folder.path}, attempt {folder.last_attempt() + 1}.")
        return folder
    if config.resume == "auto":
        what = f"run {config.id}" if config.id else f"unfinished run of {config.name}"
        say(f"resume=auto: no {what} with this configuration in {config.home}; starting a new run.")
    new = create(config, overrides=overrides, flags=flags)
    ours = held.enter_context(new.folder.held())
    assert ours, "a folder that was just made is held by another process"
    return new


def given_now(given: RunConfig) -> dict[str, object]:
    """What of the settings given concerns this attempt alone."""
    return {name: getattr(given.data, name) for name in GIVEN_NOW}


def continued(folder: RunFolder, now: Mapping[str, object]) -> RunConfig:
    """The configuration of a run that goes on: its own, with what `given_now` says."""
    own = freeze.load(folder.config_file)
    return replace(own, data=replace(own.data, **now))  # pyright: ignore[reportArgumentType]


def _given(config: RunConfig, *, held: ExitStack) -> RunFolder:
    folder = RunFolder(config.home / str(config.id))
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
    if not held.enter_context(folder.held()):
        raise Stop(
            ExitCode.CONFIG,
            f"id={config.id}: another process is working on {folder.path}.\n"
            "Wait until it ends, or leave id out to start a new run.",
        )
    return folder


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
