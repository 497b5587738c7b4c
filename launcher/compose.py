"""After Hydra could not compose a configuration: which overrides are to blame, all of them.

Hydra stops at the first mistake. Here the offending override is set aside and composition is
repeated with the rest, until what remains can be composed, and be validated in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.problems import ConfigProblems, did_you_mean, nearest, one_line
from launcher.run_config import RunConfig
from launcher.schema import setting_names
from launcher.validate import examine, messages
from trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

Compose = Callable[[Sequence[str]], "DictConfig"]
CONFIG_NAME = "config"


@dataclass
class Sorted:
    """Overrides that compose together, and those set aside with the error of each."""

    accepted: list[str] = field(default_factory=list)
    rejected: dict[str, Exception] = field(default_factory=dict)


def diagnose(args: Any, error: Exception) -> ConfigProblems | None:
    """What is wrong with the parsed command line `args`, for which Hydra raised `error`.

    Usage errors alone end with code 2; anything about the configuration ends with 78. None when
    the command line is not to blame.
    """
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    overrides, unreadable = _parse(args.overrides)
    if args.config_dir is not None:
        overrides.insert(0, f"hydra.searchpath=[file://{args.config_dir}]")
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        compose = _composer(args.config_name or CONFIG_NAME, sweeping=args.multirun)
        groups = GlobalHydra.instance().config_loader().list_groups("")
        try:
            compose([])
        except Exception as broken:
            return ConfigProblems([*unreadable, _plain(broken)])
        found = sort_out(overrides, compose)
        told = [
            explain(text, why, groups=groups, sweeping=args.multirun)
            for text, why in found.rejected.items()
        ]
        if not told:
            if unreadable:
                return ConfigProblems(unreadable, code=ExitCode.USAGE)
            if isinstance(error, ValueError):  # options that exclude each other
                return ConfigProblems([_plain(error)], code=ExitCode.USAGE)
            return ConfigProblems([_plain(error)]) if isinstance(error, HydraException) else None
        if args.help or args.cfg or args.info:  # only shown: it need not be complete
            return ConfigProblems([*unreadable, *told])
        choice_lost = any(_is_choice(text, groups) for text in found.rejected)
        for point in _points(found.accepted) if args.multirun else [found.accepted]:
            _, report = examine(compose(point))
            if choice_lost:  # what the option that was set aside would have set is not missing
                report.missing.clear()
            told += [line for line in messages(report) if line not in told]
    return ConfigProblems([*unreadable, *told])


def sort_out(overrides: Sequence[str], compose: Compose) -> Sorted:
    """Keep every override that composes with the others kept; any order of them will do."""
    found = Sorted()
    pending = list(overrides)
    while pending:
        found.rejected = {}
        for text in pending:
            try:
                compose([*found.accepted, text])
            except Exception as error:
                found.rejected[text] = error
            else:
                found.accepted.append(text)
        if len(found.rejected) == len(pending):
            break
        pending = list(found.rejected)
    found.accepted.sort(key=list(overrides).index)
    return found


def explain(text: str, error: Exception, *, groups: Sequence[str], sweeping: bool) -> str:
    """One line for the override `text` that Hydra refused with `error`, with the fix."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import MissingConfigException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    override = OverridesParser.create().parse_overrides([text])[0]
    name = override.key_or_group
    message = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _missing_option(text, error)
    if override.is_sweep_override() and not sweeping:
        value = text.partition("=")[2]
        return (
            f"{text} gives several values; add -m to run each, or write {name}=[{value}] for a list"
        )
    if "No match in the defaults list" in message:
        if name in groups:
            return f"{text}: {name} has no choice to replace yet; write +{text.lstrip('+')}"
        return f"{name} is not a setting; {_near(name, groups)}"
    already = ("Multiple values for", "more than once", "already in", "already at")
    if override.is_add() and any(part in message for part in already):
        return f"{text}: {name} is set already; write {text.lstrip('+')}"
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return f"{name} is not a setting; {_near(name, groups)}"
    return f"{text}: {_plain(error)}"


def config_flags(chosen: Any) -> list[str]:
    """The command's options that a composed Hydra node came from, to be typed again."""
    flags = []
    for source in chosen.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
    if chosen.job.config_name != CONFIG_NAME:
        flags += ["--config-name", chosen.job.config_name]
    return flags


def _missing_option(text: str, error: Any) -> str:
    wanted = str(error.missing_cfg_file)
    group, _, option = wanted.rpartition("/")
    options = ", ".join(error.options) or "none"
    guess = nearest(option, error.options)
    fix = (
        f"did you mean {group}={guess}? (options: {options})" if guess else f"use one of {options}"
    )
    own = text.lstrip("+").replace("@", "=").partition("=")
    blame = "" if own[0] == group and option in own[2] else f"{text}: "
    return f"{blame}{group}={option} does not exist; {fix}"


def _near(name: str, groups: Sequence[str]) -> str:
    known = [*setting_names(RunConfig), *(g for g in groups if g != "hydra")]
    return did_you_mean(name, known) or "remove it"


def _parse(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides that can be read, and messages about those that cannot."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    parser = OverridesParser.create()
    readable: list[str] = []
    unreadable: list[str] = []
    for text in given:
        try:
            parser.parse_overrides([text])
        except OverrideParseException:
            unreadable.append(
                f"{text} is not understood; write NAME=VALUE, with quotes around a value that "
                "holds spaces, commas, brackets or braces: \"NAME='VALUE'\""
            )
        else:
            readable.append(text)
    return list(dict.fromkeys(readable)), unreadable


def _composer(config_name: str, *, sweeping: bool) -> Compose:
    """Composes overrides; with `sweeping`, every value of each of them, returning the first."""
    from hydra import compose

    def composed(overrides: Sequence[str]) -> DictConfig:
        points = _points(overrides) if sweeping else [list(overrides)]
        made = [compose(config_name, overrides=point) for point in points]
        return made[0]

    return composed


def _points(overrides: Sequence[str]) -> list[list[str]]:
    """Points of a sweep in which every value of every override occurs: one changed at a time."""
    first = [_variants(text)[0] for text in overrides]
    changed = [
        [*first[:i], variant, *first[i + 1 :]]
        for i, text in enumerate(overrides)
        for variant in _variants(text)[1:]
    ]
    return [first, *changed]


def _variants(text: str) -> list[str]:
    """The overrides that a sweep override stands for; `text` itself if it is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override: Override = OverridesParser.create().parse_overrides([text])[0]
    if not override.is_sweep_override() or not override.is_discrete_sweep():
        return [text]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _is_choice(text: str, groups: Sequence[str]) -> bool:
    return text.lstrip("+~").partition("=")[0].partition("@")[0] in groups


def _plain(error: Exception) -> str:
    """What Hydra or OmegaConf says, in one line, without its links and its list of places."""
    cause = error.__cause__
    text = str(error) or (str(cause) if cause is not None else "") or type(error).__name__
    lines = [line for line in text.splitlines() if "full_key:" not in line]
    lines = [line for line in lines if "object_type=" not in line and "hydra.cc" not in line]
    text = one_line("\n".join(lines).partition("Search path:")[0])
    if cause is not None and str(error):
        text += f" ({one_line(str(cause).splitlines()[0])})"
    return text
