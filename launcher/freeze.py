"""config.yaml: a run's configuration, resolved, read back to an equal RunConfig by every rank."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
from launcher.schema import Report, build, setting_name

T = TypeVar("T")


def to_yaml(config: RunConfig) -> str:
    """The text of config.yaml; all text in it is quoted, so no reader takes it for a number."""
    return yaml.dump(
        asdict(config, dict_factory=_settings),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
    )


def _settings(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A section under the names that users know, see `schema.setting_name`."""
    return {name.removesuffix("_"): value for name, value in items}


def from_yaml(text: str, *, where: str) -> RunConfig:
    """The inverse of to_yaml. ConfigProblems, naming `where`, for text that it did not write.

    Read by OmegaConf: PyYAML would take a 1e-3 that somebody put there by hand for text.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigProblems([f"{where}: not the configuration of a run ({error})"]) from error
    return _built(RunConfig, tree, where=where)


def _built(kind: type[T], tree: Any, *, where: str) -> T:
    report = Report()
    made = build(kind, tree, report=report)
    if report:
        found = [f"{name} is not a setting of this version" for name in report.unknown]
        found += [f"{name} is missing" for name in report.missing] + report.mistakes
        raise ConfigProblems([f"{where}: {problem}" for problem in found])
    assert isinstance(made, kind)
    return made


class _Dumper(yaml.SafeDumper):
    """Text in double quotes, which alone keep every character; lists in one line."""

    def quoted(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"')

    def section(self, values: dict[str, Any]) -> yaml.Node:
        node = self.represent_mapping("tag:yaml.org,2002:map", values, flow_style=False)
        for name, _ in node.value:
            name.style = None
        return node

    def line(self, values: tuple[Any, ...]) -> yaml.Node:
        return self.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


_Dumper.add_representer(str, _Dumper.quoted)
_Dumper.add_representer(dict, _Dumper.section)
_Dumper.add_representer(tuple, _Dumper.line)


def plain(section: Any) -> dict[str, Any]:
    """A section of a configuration as JSON knows it, under the names that users know."""
    return asdict(section, dict_factory=_settings)


def section(kind: type[T], values: Any, *, where: str) -> T:
    """The inverse of plain. ConfigProblems, naming `where`, for values that it did not write."""
    return _built(kind, values, where=where)


def load(path: Path) -> RunConfig:
    """The RunConfig frozen in a run's config.yaml. OSError when it cannot be read, ConfigProblems
    when it is none of this version."""
    text = path.read_text(encoding="utf-8")
    try:
        return from_yaml(text, where=str(path))
    except ConfigProblems as error:
        run = path.absolute().parent
        own = f"PYTHONPATH={shlex.quote(str(run / 'code'))} {sys.executable} -P -m launcher.tools"
        raise ConfigProblems(
            error.problems,
            hint=f"If another version made this run, go on with its own code:\n"
            f"  {own} resume {shlex.quote(str(run))}",
        ) from error


def differences(
    old: Any, new: Any, *, path: str = "", skip: frozenset[str] = frozenset()
) -> list[str]:
    """Settings in which two configurations differ, as `name: old -> new`."""
    if is_dataclass(old) and not isinstance(old, type) and type(old) is type(new):
        found = []
        for f in fields(old):
            name = f"{path}.{setting_name(f)}" if path else setting_name(f)
            if name not in skip:
                found += differences(
                    getattr(old, f.name), getattr(new, f.name), path=name, skip=skip
                )
        return found
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        found = []
        for name in old:
            found += differences(old[name], new[name], path=f"{path}.{name}", skip=skip)
        return found
    return [] if old == new else [f"{path}: {old} -> {new}"]
