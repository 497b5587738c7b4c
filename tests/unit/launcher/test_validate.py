"""What is refused before anything starts, each mistake with its fix, all of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import save_file

from launcher.problems import ConfigProblems
from launcher.rules import owners_can_number_their_rows
from launcher.validate import validate
from trainer.config import ParallelConfig

Composed = Callable[..., DictConfig]
GOLDEN_TOKENIZER = Path(__file__).parents[2] / "golden" / "tokenizer.json"


def problems(cfg: DictConfig, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        validate(cfg, environ=environ or {})
    return caught.value.problems


def test_tiny_is_sound_and_absolute(composed: Composed, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words")
    config = validate(composed("+experiment=tiny", "data=text", "data.paths=[a.txt]"), environ={})
    assert config.name == "tiny"
    assert config.runs_dir == str(tmp_path / "runs")
    assert config.data.paths == (str(tmp_path / "a.txt"),)
    assert config.data.tokenizer == "deepseek"


def test_all_at_once(composed: Composed) -> None:
    cfg = composed(
        "+experiment=tiny",
        "+typo=1",
        "+train.stepz=5",
        "optim.lr=fast",
        "eval.every=${nowhere.to.be.found}",
        "model.num_attention_heads=7",
        "data=text",
        "data.paths=[/no/such/file.txt]",
        "data.pack_length=63",
        "train.packs_per_step=3",
        "train.packs_per_micro_batch=2",
        "id=a/b",
    )
    found = problems(cfg, {"WORLD_SIZE": "2"})
    expected = [
        "typo is not a setting",
        "train.stepz is not a setting; did you mean train.steps?",
        "optim.lr=fast must be a number",
        "eval.every=${nowhere.to.be.found} cannot be resolved",
        "model: num_attention_heads=7 is not divisible by o_groups=2",
        "data.paths: /no/such/file.txt: no such file",
        "train.packs_per_step=3 cannot be dealt out evenly",
        "WORLD_SIZE=2 in the environment, but the plan has 1 rank(s)",
    ]
    for start in expected:
        assert sum(p.startswith(start) for p in found) == 1, (start, found)
    assert len(found) == len(expected), found


def test_sources_of_a_mixture_are_checked_like_settings(composed: Composed) -> None:
    mixture = (
        "{web:{weight:1.0,source:jsonl,paths:[/no/such],wight:2},talk:{source:embedded,epochs:x}}"
    )
    found = problems(composed("+experiment=tiny", "data=mixture", f"data.mixture={mixture}"))
    for start in [
        "data.mixture.web.wight is not a setting; did you mean data.mixture.web.weight?",
        "data.mixture.talk.weight is not set",
        "data.mixture.talk.epochs=x must be a whole number",
    ]:
        assert any(p.startswith(start) for p in found), (start, found)
    mixture = "{web:{weight:1.0,source:jsonl,paths:[/no/such]},talk:{source:embedded,weight:0.0}}"
    found = problems(composed("+experiment=tiny", "data=mixture", f"data.mixture={mixture}"))
    assert [p.partition(" ")[0] for p in found] == [
        "data.mixture.talk.weight=0.0",
        "data.mixture.web.paths:",
    ]


def test_rules_of_the_whole_come_too(composed: Composed) -> None:
    found = problems(composed("+experiment=tiny", "data.pack_length=63", "id=a/b", "seed=-1"))
    assert [p.split(" ")[0] for p in found] == ["data.pack_length=63"]
    found = problems(composed("+experiment=tiny", "id=a/b", "seed=-1", "runs_dir=''"))
    assert [p.split(" ")[0] for p in found] == ["seed=-1", "id=a/b", "runs_dir"]


def test_missing_values_point_to_experiments(composed: Composed) -> None:
    found = problems(composed())
    names = {p.split(" ")[0] for p in found}
    assert names == {"name", "train.steps", "train.packs_per_step"}
    assert all("+experiment=tiny" in p for p in found)


def test_a_missing_value_that_is_referred_to_is_told_once(composed: Composed) -> None:
    found = problems(composed("name=x", "train.packs_per_step=2", "eval.every=${train.steps}"))
    assert [p.split(" ")[0] for p in found] == ["train.steps"]


def test_interpolations_are_resolved(composed: Composed) -> None:
    cfg = composed("+experiment=tiny", "eval.every=${train.steps}", "train.steps=12")
    assert validate(cfg, environ={}).eval.every == 12


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["parallel.cp=2"], "parallel.dp_replicate=1 x parallel.dp_shard=1 x parallel.cp=2 is a"),
        (["eval.every=5", "data.holdout=0"], "eval.every=5 needs documents held out"),
        (["data.pack_length=1"], "data.pack_length=1 leaves nothing to predict"),
        (["data=jsonl"], "data.paths is not set"),
        (["data=text", "data.paths=[]"], "data.source=text needs data.paths"),
        (["data.tokenizer=/no.json"], "data.tokenizer=/no.json: no such file"),
        (["model.engram_n_heads=3"], "model: engram_num_embeddings="),
        (["model.hidden_size=1000000"], "model: "),
        (["train.threads=0"], "train.threads=0"),
        (["sweep.scheduler=asha"], "sweep.scheduler=asha works through Ray Tune, but this is"),
        (["sweep.asha.reduction=1"], "sweep.asha.reduction=1 must be 2 or more"),
        (["sweep.asha.grace_steps=0"], "sweep.asha.grace_steps=0 must be 1 or more"),
        (
            ["launcher=ray", "sweep.scheduler=asha", "sweep.asha.grace_steps=90"],
            "sweep.asha.grace_steps=90 leaves nothing of train.steps=90",
        ),
        (["sweep.metric=eval_loss", "eval.every=0"], "sweep.metric=eval_loss, but eval.every=0"),
        (["model.num_hidden_layers=9"], "model: compress_ratios has 6 entries"),
    ],
)
def test_impossible_combinations(composed: Composed, overrides: list[str], told: str) -> None:
    found = problems(composed("+experiment=tiny", *overrides))
    assert any(p.startswith(told) for p in found), found


def test_all_that_a_mesh_does_not_divide_is_told_at_once(composed: Composed) -> None:
    """Also next to a mistake that keeps the whole from being put together."""
    mesh = ["parallel.dp_shard=2", "parallel.cp=3", "parallel.ep=3", "parallel.engram_owners=4"]
    sizes = ["train.packs_per_step=3", "data.pack_length=4"]
    found = problems(composed("+experiment=tiny", *mesh, *sizes, "train.threads=x"))
    told = [f.partition("=")[0] for f in found if "launcher=local" not in f]
    assert sorted(told) == [
        "data.pack_length",
        "parallel.engram_owners",
        "parallel.ep",
        "train.threads",
    ]
    found = problems(composed("+experiment=tiny", *mesh, *sizes))
    told = [f.partition("=")[0] for f in found if "launcher=local" not in f]
    assert sorted(told) == [
        "data.pack_length",
        "parallel.engram_owners",
        "parallel.ep",
        "train.packs_per_step",
    ]


def test_one_owner_of_more_rows_than_it_can_number(composed: Composed) -> None:
    model = validate(composed("+experiment=tiny"), environ={}).model
    huge = dataclasses.replace(model, engram_num_embeddings=(2**31, 2**31))
    (told,) = owners_can_number_their_rows(huge, ParallelConfig())
    assert "parallel.engram_owners=1 leaves 4,294,967,296 Engram rows to one rank" in told
    assert owners_can_number_their_rows(huge, ParallelConfig(dp_shard=4)) == []


def test_a_model_too_big_for_the_machine(composed: Composed) -> None:
    (told,) = problems(composed("+experiment=tiny", "model=flash"))
    assert "741.5 B weights" in told
    assert "model=tiny" in told


def test_another_tokenizer_is_refused_with_both_numbers(composed: Composed) -> None:
    found = problems(composed("+experiment=tiny", f"data.tokenizer={GOLDEN_TOKENIZER}"))
    (told,) = [p for p in found if "Engram ids" in p]
    assert "323" in told
    assert "99,092" in told


def test_weights_are_looked_at_before_anything_starts(
    composed: Composed, small, tmp_path: Path, monkeypatch
) -> None:
    (found,) = problems(composed("+experiment=tiny", "model.weights=/no/such"))
    assert found == "model.weights=/no/such: there is no such folder; dsv41 export writes one"
    # The weights of another model, and one shard missing: all in one list.
    monkeypatch.chdir(small.path.parent)
    small.shard(2).unlink()
    found = problems(composed("+experiment=tiny", f"model.weights={small.path.name}"))
    assert all(p.startswith("model.weights=weights: ") for p in found)
    told = [p.partition(": ")[2] for p in found]
    assert "config.json has vocab_size=448, this model 129280" in told
    assert any(p.startswith("model-00002-of-00003.safetensors is missing") for p in told)
    assert len(told) == 41 and told[-1].startswith("... and ") and told[-1].endswith(" more")


def test_mapped_tables_are_looked_at_before_anything_starts(
    composed: Composed, tmp_path: Path, monkeypatch
) -> None:
    mapped = ("+experiment=tiny", "model.engram.store=mapped")
    (found,) = problems(composed(*mapped))
    assert found.startswith("model: engram.store=mapped needs engram.path")
    (found,) = problems(composed(*mapped, "model.engram.path=/no/such/tables"))
    assert found == "model.engram.path=/no/such/tables: there is no such file or folder"
    (found,) = problems(composed("+experiment=tiny", "model.engram.path=x"))
    assert "engram.path=x is not read by engram.store=device" in found
    monkeypatch.chdir(tmp_path)
    rows, dim = (120754, 121928), 16
    tables = {
        f"layers.{layer}.engram.embed.weight": torch.ones(count, dim, dtype=torch.bfloat16)
        for layer, count in zip((1, 3), rows, strict=True)
    }
    save_file(tables, tmp_path / "model.safetensors")
    config = validate(composed(*mapped, "model.engram.path=."), environ={})
    assert config.model.engram.path == str(tmp_path)


def test_an_experiment_without_its_package_line(composed: Composed, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("train: {steps: 3}\n")
    found = problems(composed(f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine"))
    assert "experiment is not a setting; begin your experiment file with the line" in found[0]


def test_the_matching_world_size_is_fine(composed: Composed) -> None:
    validate(composed("+experiment=tiny"), environ={"WORLD_SIZE": "1"})
