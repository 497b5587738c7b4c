"""config.yaml: a run's configuration, resolved, read back to an equal RunConfig by every rank."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
from launcher.schema import Report, build


def to_yaml(config: RunConfig) -> str:
    """The text of config.yaml.

    Written and read by OmegaConf: PyYAML alone reads 1e-3 as text, and does not quote text that
    OmegaConf would read as a number.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def from_yaml(text: str, *, where: str) -> RunConfig:
    """The inverse of to_yaml. ConfigProblems, naming `where`, for text that it did not write."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigProblems([f"{where}: not the configuration of a run ({error})"]) from error
    report = Report()
    config = build(RunConfig, tree, report=report)
    if report:
        found = [f"{name} is not a setting of this version" for name in report.unknown]
        found += [f"{name} is missing" for name in report.missing] + report.mistakes
        raise ConfigProblems([f"{where}: {problem}" for problem in found])
    assert isinstance(config, RunConfig)
    return config


def load(path: Path) -> RunConfig:
    """The RunConfig frozen in a run's config.yaml. OSError when it cannot be read."""
    return from_yaml(path.read_text(encoding="utf-8"), where=str(path))


def differences(
    old: Any, new: Any, *, path: str = "", skip: frozenset[str] = frozenset()
) -> list[str]:
    """Settings in which two configurations differ, as `name: old -> new`."""
    if is_dataclass(old) and not isinstance(old, type) and type(old) is type(new):
        found = []
        for f in fields(old):
            name = f"{path}.{f.name}" if path else f.name
            if name not in skip:
                found += differences(
                    getattr(old, f.name), getattr(new, f.name), path=name, skip=skip
                )
        return found
    return [] if old == new else [f"{path}: {old} -> {new}"]
