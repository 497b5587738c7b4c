"""config.yaml read back is the configuration that was written, whatever its values."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.config import FieldsConfig, MixtureSource
from launcher import freeze
from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
from launcher.run_dir import create

ANY = st.characters(exclude_categories=()) | st.sampled_from(
    "\x00\x07\x7f\x85\u2028\u2029\ufeff\udcff"
)
TEXT = st.text(ANY, min_size=1).filter(lambda s: "${" not in s)
# What YAML readers like to take for something else.
TRAPS = st.sampled_from(
    [
        "1e-3",
        "1.0",
        "0x1F",
        "1_000",
        "null",
        "~",
        "true",
        "no",
        "2020-01-01",
        "1:30",
        "",
        " x ",
        "'",
        "-",
        "- a",
        "a: b",
        "#",
        "a #b",
        "{}",
        "[]",
        "\n",
        "\t",
        "é",
        "\u2028",
        "!x",
        "&a",
        "*a",
        "???",
    ]
)
PATHS = st.lists(TEXT | TRAPS.filter(bool), min_size=1, max_size=3).map(tuple)
POSITIVE = st.floats(min_value=1e-300, max_value=1e300)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lr=POSITIVE,
    eps=st.sampled_from([1e-3, 1e-20, 1e-8, 5e-324, 1.0, 3e22]),
    clip=POSITIVE | st.just(math.inf),
    threads=st.none() | st.integers(1, 2**40),
    seed=st.integers(0, 2**63),
    paths=PATHS,
    field=TEXT | TRAPS.filter(bool),
    folder=TEXT | TRAPS.filter(bool),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
    | st.sampled_from(["1e-3", "1.0", "123", "null", "true", "no", "0x1F", "1_000"]),
    carried=st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple),
)
def test_every_value_survives(
    tiny: RunConfig, *, lr, eps, clip, threads, seed, paths, field, folder, name, carried
) -> None:
    config = replace(
        tiny,
        name=name,
        id=name,
        seed=seed,
        runs_dir=folder,
        optim=replace(tiny.optim, lr=lr, final_lr=lr / 2, eps=eps),
        train=replace(tiny.train, clip_norm=clip, threads=threads),
        data=replace(
            tiny.data,
            source="mixture",
            mixture={
                "web": MixtureSource(
                    source="jsonl", paths=paths, fields=FieldsConfig(text=field), weight=lr
                ),
                "code-2": MixtureSource(source="embedded", weight=1.0, epochs=3),
            },
        ),
        model=replace(tiny.model, carried=carried),
    )
    assert freeze.from_yaml(freeze.to_yaml(config), where="here") == config


def test_small_floats_are_written_as_numbers(tiny: RunConfig) -> None:
    import yaml

    config = replace(tiny, optim=replace(tiny.optim, lr=1e-3, eps=1e-20))
    text = freeze.to_yaml(config)
    plain = yaml.safe_load(text)
    assert plain["optim"]["lr"] == 1e-3
    assert plain["optim"]["eps"] == 1e-20
    assert "\n  compress_ratios: [0, 0, 2, 2, 1, 1]\n" in text
    assert '\nname: "tiny"\n' in text


def test_a_number_put_there_by_hand_is_one(tiny: RunConfig) -> None:
    text = freeze.to_yaml(tiny).replace("lr: 0.004\n", "lr: 4e-3\n")
    assert "lr: 4e-3" in text
    assert freeze.from_yaml(text, where="here") == tiny


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seed: 1\n", "", "here: seed is missing"),
        ("seed: 1\n", "seed: one\n", "here: seed=one must be a whole number"),
        ("seed: 1\n", "seed: 1\nsede: 2\n", "here: sede is not a setting of this version"),
        ("seed: 1\n", "seed: [\n", "here: not the configuration of a run"),
    ],
)
def test_a_damaged_file_is_named(tiny: RunConfig, old: str, new: str, told: str) -> None:
    text = freeze.to_yaml(tiny)
    assert text.count(old) == 1
    with pytest.raises(ConfigProblems) as caught:
        freeze.from_yaml(text.replace(old, new), where="here")
    assert caught.value.problems[0].startswith(told)


def test_differences_name_settings(tiny: RunConfig) -> None:
    other = replace(tiny, id="x", seed=7, train=replace(tiny.train, steps=9))
    found = freeze.differences(tiny, other, skip=frozenset({"id"}))
    assert found == ["seed: 1 -> 7", f"train.steps: {tiny.train.steps} -> 9"]


def test_a_setting_may_be_named_by_a_word_of_python(tiny: RunConfig) -> None:
    changed = replace(tiny, checkpoint=replace(tiny.checkpoint, async_=True))
    text = freeze.to_yaml(changed)
    assert "\n  async: true\n" in text and "async_" not in text
    assert freeze.from_yaml(text, where="here") == changed
    assert freeze.differences(tiny, changed) == ["checkpoint.async: False -> True"]


def test_a_run_of_another_version_says_how_to_go_on_with_it(tiny: RunConfig) -> None:
    """By the code that is kept with the run."""
    folder = create(tiny, overrides=[]).folder
    folder.config_file.write_text("brand_new: 3\n" + folder.config_file.read_text())
    with pytest.raises(ConfigProblems) as caught:
        freeze.load(folder.config_file)
    assert caught.value.code == 78
    assert "config.yaml: brand_new is not a setting of this version" in caught.value.message
    told = f"PYTHONPATH={folder.code} {sys.executable} -P -m launcher.tools resume {folder.path}"
    assert told in caught.value.message
