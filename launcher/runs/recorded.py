"""The words that made a run, and its configuration with other words added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launcher.composed import composed_run
from launcher.problems import Stop
from launcher.resume import SECTIONS
from launcher.run_config import RunConfig
from launcher.run_dir import RunFolder
from launcher.runs.view import read_json
from trainer.exit_codes import ExitCode

T = TypeVar("T")


@dataclass(frozen=True)
class Words:
    """overrides as given to dsv41-train, and where groups of the user's own were found."""

    overrides: tuple[str, ...]
    config_dir: str | None = None
    config_name: str | None = None

    @property
    def flags(self) -> list[str]:
        """The options that go with the overrides."""
        named = {"--config-dir": self.config_dir, "--config-name": self.config_name}
        return [word for flag, value in named.items() if value for word in (flag, value)]


def words_of(folder: RunFolder) -> Words:
    """What the run was made with."""
    text = (folder.path / "overrides.txt").read_text("utf-8", errors="surrogateescape")
    flags = read_json(folder.path / "env.json").get("flags", [])
    given = dict(zip(flags[::2], flags[1::2], strict=False))
    return Words(
        tuple(text.splitlines()),
        config_dir=given.get("--config-dir"),
        config_name=given.get("--config-name"),
    )


def with_changes(old: Words, overrides: Sequence[str]) -> Words:
    """The old words, less those that set again what a new one sets, and the new ones."""
    named = {_key(text) for text in overrides}
    kept = [text for text in old.overrides if _key(text) not in named]
    return replace(old, overrides=(*kept, *overrides))


def changed(own: RunConfig, old: Words, new: Words, *, named: Sequence[str]) -> RunConfig:
    """A run's own configuration with exactly what the new words change in it.

    Both are composed now and here, and only where they differ is the run's own configuration
    touched: what has changed since in conf/, or in experiments of the user's own, does not creep
    in, and paths given then are those of then. named: the words that were added. Of sections in
    which a run may have changed since it was made, what they name is set even if it does not
    differ. ConfigProblems lists all that is wrong.
    """
    if old.config_dir is not None and not Path(old.config_dir).is_dir():
        raise Stop(
            ExitCode.CONFIG,
            f"The run was made with --config-dir {old.config_dir}, which is gone; give its new "
            "place with --config-dir",
        )
    before, after = (
        composed_run(w.overrides, config_dir=w.config_dir, config_name=w.config_name, rules=())
        for w in (old, new)
    )
    found = transplanted(own, before, after)
    for key in map(_key, named):
        if key.partition(".")[0] in SECTIONS:
            found = _with(found, after, key.split("."))
    return found


def transplanted(own: T, before: T, after: T) -> T:
    """`own` with the values in which `after` differs from `before`."""
    parts: Any = (own, before, after)
    if is_dataclass(own) and len({type(part) for part in parts}) == 1:
        values = {
            f.name: transplanted(*(getattr(part, f.name) for part in parts))
            for f in fields(own)
            if f.init
        }
        return replace(own, **values)  # pyright: ignore[reportArgumentType]
    if isinstance(own, dict) and all(isinstance(p, dict) and p.keys() == own.keys() for p in parts):
        return {k: transplanted(own[k], parts[1][k], parts[2][k]) for k in own}  # pyright: ignore
    return own if before == after else after


def _with(own: Any, other: Any, path: Sequence[str]) -> Any:
    """`own` with what `other` has at `path`."""
    if not path or not is_dataclass(own):
        return other
    name = path[0]
    part = _with(getattr(own, name), getattr(other, name), path[1:])
    return replace(own, **{name: part})  # pyright: ignore[reportArgumentType]


def _key(override: str) -> str:
    """The setting or group that an override is about: `+experiment=tiny` -> experiment."""
    return override.lstrip("+~").partition("=")[0]
