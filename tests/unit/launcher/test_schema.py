"""The walker from plain values to dataclasses: strict, and complete in what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from launcher.schema import ABSENT, BROKEN, Report, build, setting_names


@dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 0.5

    def problems(self) -> list[str]:
        return [f"inner.size={self.size} is too small"] if self.size < 1 else []


class PickyError(ValueError):
    problems = ("first rule", "second rule")


@dataclass(frozen=True)
class Picky:
    number: int = 0

    def __post_init__(self) -> None:
        if self.number > 9:
            raise PickyError


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["red", "green"]
    flag: bool
    inner: Inner
    ids: tuple[int, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    limit: int | None = None
    picky: Picky = field(default_factory=Picky)


GOOD = {"name": "x", "kind": "red", "flag": True, "inner": {"size": 3, "rate": 1}}


def test_builds_the_whole_tree() -> None:
    report = Report()
    tree = {**GOOD, "ids": [1, 2], "pairs": [["a", "b"]], "limit": 4}
    made = build(Outer, tree, report=report)
    assert not report
    assert made == Outer("x", "red", True, Inner(3, 1.0), ids=(1, 2), pairs=(("a", "b"),), limit=4)
    assert isinstance(made.inner.rate, float)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"flag": 1}, "flag=1 must be true or false"),
        ({"flag": "true"}, "flag=true must be true or false"),
        ({"kind": "gren"}, "kind=gren is none of red, green; did you mean green?"),
        ({"kind": True}, "kind=true is none of red, green; use one"),
        ({"name": 5}, "name=5 must be text; write \"name='5'\""),
        ({"name": None}, "name=null must be text; write \"name='null'\""),
        ({"name": "a${b}"}, "name=a${b} must not contain ${"),
        ({"limit": "3"}, "limit=3 must be a whole number"),
        ({"limit": 1e3}, "limit=1000.0 must be a whole number; write 1000"),
        ({"limit": True}, "limit=true must be a whole number"),
        ({"ids": 3}, "ids=3 must be a list; write [3]"),
        ({"ids": [1, "b"]}, "ids[1]=b must be a whole number"),
        ({"pairs": [["a"]]}, "pairs[0]=[a] must be a list of 2 values"),
        ({"inner": 5}, "inner=5 must be a section with the settings size, rate"),
        ({"inner": {"size": 1, "rate": "1e-3"}}, "inner.rate=1e-3 must be a number"),
        ({"inner": {"size": 1, "rate": float("nan")}}, "inner.rate=nan must be a number"),
        ({"inner": {"size": 0}}, "inner.size=0 is too small"),
    ],
)
def test_wrong_values_are_named_with_their_fix(change: dict, told: str) -> None:
    report = Report()
    build(Outer, {**GOOD, **change}, report=report)
    assert report.mistakes == [told]
    assert not report.unknown
    assert not report.missing


def test_a_constructor_that_lists_problems_reports_each() -> None:
    report = Report()
    assert build(Outer, {**GOOD, "picky": {"number": 10}}, report=report) is BROKEN
    assert report.mistakes == ["picky: first rule", "picky: second rule"]


def test_everything_is_reported_at_once() -> None:
    report = Report()
    tree = {"kind": 3, "flag": ABSENT, "inner": {"sise": 2, "rate": BROKEN}, "extra": 1}
    assert build(Outer, tree, report=report) is BROKEN
    assert report.unknown == ["extra", "inner.sise"]
    assert report.missing == ["name", "flag", "inner.size"]
    assert report.mistakes == ["kind=3 is none of red, green; use one"]


def test_a_missing_mark_is_missing_even_with_a_default() -> None:
    report = Report()
    build(Outer, {**GOOD, "limit": ABSENT}, report=report)
    assert report.missing == ["limit"]


def test_setting_names_include_sections() -> None:
    assert setting_names(Outer)[:6] == ["name", "kind", "flag", "inner", "inner.size", "inner.rate"]
