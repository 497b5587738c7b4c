"""Plain values -> frozen dataclasses, strictly, with every mistake listed instead of raised.

Knows what configuration classes use: dataclasses in dataclasses, int, float, bool, str, Literal,
`X | None`, tuples and mappings from names. Nothing is guessed: "3" is no number and 1 is no bool;
an int is a float.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launcher.problems import did_you_mean, one_line


class Absent:
    """Marks a value that is missing (???) in the tree."""


class Broken:
    """Marks a value that cannot be used and was reported."""


ABSENT = Absent()
BROKEN = Broken()


@dataclass
class Report:
    """What was found: names that do not exist, names that are not set, and other mistakes.

    near: names that do exist beside unknown ones.
    """

    unknown: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.unknown or self.missing or self.mistakes)


def build(cls: type, tree: Any, *, report: Report, path: str = "") -> Any:
    """An instance of dataclass `cls` from nested dicts and lists; BROKEN where none can be made.

    Mistakes of the whole tree go to `report`, each with its dotted name and its fix. A class whose
    constructor raises ValueError, or that has problems() -> list[str], adds its own. The result is
    sound only if the report is empty.
    """
    values = sections(cls, tree, report=report, path=path)
    if any(value is BROKEN for value in values.values()):
        return BROKEN
    try:
        made = cls(**values)
    except ValueError as error:
        found = getattr(error, "problems", [str(error)])
        report.mistakes.extend(f"{path}: {problem}" if path else problem for problem in found)
        return BROKEN
    check = getattr(made, "problems", None)
    if check is not None:
        report.mistakes.extend(p for p in check() if p not in report.mistakes)
    return made


def sections(cls: type, tree: Any, *, report: Report, path: str = "") -> dict[str, Any]:
    """The field values for `cls` from `tree`, BROKEN where one cannot be had; see `build`."""
    names = [setting_name(f) for f in fields(cls)]
    if not isinstance(tree, dict):
        if tree is not BROKEN:
            report.mistakes.append(
                f"{path}={shown(tree)} must be a section with the settings {', '.join(names)}"
            )
        return dict.fromkeys(names, BROKEN)
    hints = _hints(cls)
    if unknown := [_join(path, key) for key in tree if key not in names]:
        report.unknown.extend(unknown)
        report.near.extend(_join(path, name) for name in names)
    values: dict[str, Any] = {}
    for f in fields(cls):
        key = setting_name(f)
        name = _join(path, key)
        value = tree.get(key, ABSENT)
        if value is ABSENT:
            if key not in tree and (f.default is not MISSING or f.default_factory is not MISSING):
                continue
            report.missing.append(name)
            values[f.name] = BROKEN
        else:
            values[f.name] = convert(hints[f.name], value, report=report, path=name)
    return values


def convert(hint: Any, value: Any, *, report: Report, path: str) -> Any:
    """`value` as type `hint`, or BROKEN with the mistake in `report`."""
    if value is BROKEN:
        return BROKEN
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, report=report, path=path)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [a for a in args if a is not type(None)]
        assert len(kinds) == 1 and len(args) == 2, f"only X | None is known, not {hint}"
        return None if value is None else convert(kinds[0], value, report=report, path=path)
    if origin is tuple:
        return _tuple(args, value, report=report, path=path)
    if origin is Mapping:
        return _mapping(args[1], value, report=report, path=path)
    mistake = _mistake(hint, value, path)
    if mistake:
        report.mistakes.append(f"{path}={shown(value)} {mistake}")
        return BROKEN
    return float(value) if hint is float else value


def _tuple(args: tuple[Any, ...], value: Any, *, report: Report, path: str) -> Any:
    if not isinstance(value, list | tuple):
        report.mistakes.append(f"{path}={shown(value)} must be a list; write [{shown(value)}]")
        return BROKEN
    if args[-1] is Ellipsis:
        kinds = [args[0]] * len(value)
    elif len(args) == len(value):
        kinds = list(args)
    else:
        report.mistakes.append(f"{path}={shown(value)} must be a list of {len(args)} values")
        return BROKEN
    items = [
        convert(kind, item, report=report, path=f"{path}[{i}]")
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    ]
    return BROKEN if any(item is BROKEN for item in items) else tuple(items)


def _mapping(kind: Any, value: Any, *, report: Report, path: str) -> Any:
    if not isinstance(value, dict):
        report.mistakes.append(f"{path}={shown(value)} must be a section of names and their values")
        return BROKEN
    items = {
        str(name): convert(kind, item, report=report, path=_join(path, name))
        for name, item in value.items()
    }
    return BROKEN if any(item is BROKEN for item in items.values()) else items


def _mistake(hint: Any, value: Any, path: str) -> str:
    """Why `value` is not of the simple type `hint`, with the fix; empty when it is."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return ""
        guess = did_you_mean(str(value), [str(c) for c in choices])
        return f"is none of {', '.join(shown(c) for c in choices)}; {guess or 'use one'}"
    if hint is bool:
        return "" if isinstance(value, bool) else "must be true or false"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        if number and isinstance(value, float) and value.is_integer():
            return f"must be a whole number; write {int(value)}"
        return "" if number and isinstance(value, int) else "must be a whole number"
    if hint is float:
        return "" if number and not math.isnan(value) else "must be a number"
    assert hint is str, f"configuration classes may not use the type {hint}"
    if not isinstance(value, str):
        return f"must be text; write \"{path}='{shown(value)}'\""
    # The frozen file could not tell such text from an interpolation.
    return "must not contain ${" if "${" in value else ""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, as types: a sweep asks for them thousands of times."""
    return get_type_hints(cls)


def setting_name(field: Field[Any]) -> str:
    """What users call a field: its name, which ends in "_" in Python where it is a keyword."""
    return field.name.removesuffix("_")


def setting_names(cls: type, path: str = "") -> list[str]:
    """Dotted names of all settings of `cls`, sections included, in order."""
    names: list[str] = []
    hints = _hints(cls)
    for f in fields(cls):
        name = _join(path, setting_name(f))
        names.append(name)
        hint = hints[f.name]
        if is_dataclass(hint) and isinstance(hint, type):
            names.extend(setting_names(hint, name))
    return names


def shown(value: Any) -> str:
    """A value as one would write it on the command line, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        text = f"[{','.join(shown(item) for item in value)}]"
    elif isinstance(value, dict):
        text = f"{{{','.join(f'{k}:{shown(v)}' for k, v in value.items())}}}"
    else:
        text = one_line(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
