"""The composed Hydra configuration -> RunConfig, or everything that is wrong with it at once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.config import SourceConfig
from launcher.problems import ConfigProblems, did_you_mean, one_line
from launcher.rules import RULES, Rule
from launcher.run_config import RunConfig
from launcher.schema import ABSENT, BROKEN, Report, sections, setting_names

if TYPE_CHECKING:
    from omegaconf import DictConfig


def validate(
    cfg: DictConfig, *, environ: Mapping[str, str] = os.environ, rules: Sequence[Rule] = RULES
) -> RunConfig:
    """The run that `cfg` describes, with all paths absolute. ConfigProblems lists all mistakes.

    rules: those between settings that must hold; tools that do not train need fewer.
    """
    config, report = examine(cfg, environ=environ, rules=rules)
    if config is None:
        raise ConfigProblems(messages(report))
    return config


def examine(
    cfg: DictConfig, *, environ: Mapping[str, str] = os.environ, rules: Sequence[Rule] = RULES
) -> tuple[RunConfig | None, Report]:
    """Like `validate`, but what is wrong comes back as a Report; the config is None then.

    Rules between settings are tried wherever the sections that they need can be read, so that one
    mistake hides no other.
    """
    report = Report()
    tree = _plain(cfg, report=report, path="")
    parts = {
        name: value
        for name, value in sections(RunConfig, tree, report=report).items()
        if value is not BROKEN
    }
    given = {"environ": environ, **parts}
    for rule in rules:
        needed = inspect.signature(rule).parameters
        if all(name in given for name in needed):
            found = rule(**{name: given[name] for name in needed})
            report.mistakes.extend(p for p in found if p not in report.mistakes)
    if report:
        return None, report
    config = RunConfig(**parts)
    report.mistakes.extend(config.problems())
    for rule in rules:
        if not report and "config" in inspect.signature(rule).parameters:
            report.mistakes.extend(rule(config=config))
    return (None if report else absolute(config)), report


def broken(config: RunConfig, *, rules: Sequence[Rule] = RULES) -> list[str]:
    """What keeps a configuration that was frozen, or put together, from being run here and now."""
    given = {f.name: getattr(config, f.name) for f in fields(config)}
    given |= {"environ": os.environ, "config": config}
    found = config.problems()
    for rule in rules:
        problems = rule(**{name: given[name] for name in inspect.signature(rule).parameters})
        found += [problem for problem in problems if problem not in found]
    return found


def messages(report: Report) -> list[str]:
    """One line a problem, each with its fix."""
    if not report:
        return []
    known = [*setting_names(RunConfig), *report.near, "experiment"]
    found = []
    for name in report.unknown:
        if name == "experiment":
            fix = "begin your experiment file with the line '# @package _global_'"
        else:
            fix = did_you_mean(name, known) or "remove it"
        found.append(f"{name} is not a setting; {fix}")
    found += [
        f"{name} is not set; choose an experiment (+experiment=tiny, see --help) or write "
        f"{name}=VALUE"
        for name in report.missing
    ]
    return found + report.mistakes


def absolute(config: RunConfig) -> RunConfig:
    """Every path absolute: a run is continued from other folders, and by other processes."""
    data = config.data
    tokenizer = data.tokenizer if data.tokenizer == "deepseek" else _absolute(data.tokenizer)
    data = replace(
        data,
        paths=_absolute_paths(data),
        mixture={n: replace(s, paths=_absolute_paths(s)) for n, s in data.mixture.items()},
        tokenizer=tokenizer,
        cache_dir=_absolute(str(data.cache_folder)),
    )
    engram = config.model.engram
    if engram.path:
        engram = replace(engram, path=_absolute(engram.path))
    weights = _absolute(config.model.weights) if config.model.weights else ""
    model = replace(config.model, engram=engram, weights=weights)
    return replace(config, model=model, data=data, runs_dir=_absolute(config.runs_dir))


def _absolute_paths(source: SourceConfig) -> tuple[str, ...]:
    """Absolute, but for the name of a dataset that is nowhere here."""
    if source.source == "hf" and not any(Path(p).expanduser().exists() for p in source.paths):
        return source.paths
    return tuple(_absolute(path) for path in source.paths)


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())


def _plain(node: Any, *, report: Report, path: str) -> Any:
    """Dicts and lists of plain values; ABSENT for ???, BROKEN for interpolations that fail."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    in_list = not isinstance(node, DictConfig)
    out: dict[str, Any] = {}
    for key in range(len(node)) if in_list else list(node.keys()):
        name = f"{path}[{key}]" if in_list else f"{path}.{key}" if path else str(key)
        try:
            if OmegaConf.is_missing(node, key):
                out[str(key)] = ABSENT
                continue
            value = node[key]
        except InterpolationToMissingValueError:
            out[str(key)] = BROKEN  # the value that it refers to is reported as missing
            continue
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)[key]  # pyright: ignore
            reason = one_line(str(error).split("\n")[0])
            report.mistakes.append(
                f"{name}={raw} cannot be resolved ({reason}); "
                "correct the name inside ${...} or write the value"
            )
            out[str(key)] = BROKEN
            continue
        is_container = OmegaConf.is_config(value)
        out[str(key)] = _plain(value, report=report, path=name) if is_container else value
    return list(out.values()) if in_list else out
