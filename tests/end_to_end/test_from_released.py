"""Train, export in the released layout, train on from there with mapped tables, export again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor, equal, uint8

SHARD = "model-00001-of-00001.safetensors"


@pytest.mark.long
def test_a_model_goes_on_from_its_released_files(place) -> None:
    first = place.train(*place.small)
    assert first.code == 0, first.text
    (run,) = place.runs()
    made = place.run("dsv41", "export", str(run), "--to", "released", "--format", "released")
    assert made.code == 0, made.text
    released = place.folder / "released"
    names = {"config.json", "model.safetensors.index.json", SHARD}
    assert {p.name for p in released.iterdir()} == names | {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    second = place.train(
        *place.small,
        "name=second",
        "model.weights=released",
        "model.engram={store:mapped,path:released}",
    )
    assert second.code == 0, second.text
    assert f"starting from the weights in {released}" in second.out
    ends = [json.loads(m.read_text().splitlines()[-1])["loss"] for m in metrics_by_age(place)]
    starts = [json.loads(m.read_text().splitlines()[0])["loss"] for m in metrics_by_age(place)]
    assert abs(starts[1] - ends[0]) < abs(starts[0] - starts[1])
    run = place.runs()[-1]
    made = place.run("dsv41", "export", str(run), "--to", "again", "--format", "released")
    assert made.code == 0, made.text
    before, after = load_file(released / SHARD), load_file(place.folder / "again" / SHARD)
    assert before.keys() == after.keys()
    same = {n for n in before if equal(raw(before[n]), raw(after[n]))}
    frozen = {n for n in before if ".engram.embed." in n or ".indexer." in n}
    assert frozen and frozen <= same
    assert any(n not in same for n in before)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(uint8)


def metrics_by_age(place) -> list[Path]:
    return [run / "metrics.jsonl" for run in place.runs()]
