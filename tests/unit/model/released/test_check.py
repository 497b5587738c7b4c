"""What keeps a model from starting with some weights, told from headers and config.json."""

from __future__ import annotations

import json
from dataclasses import replace

from model.config import EngramStoreConfig, QatConfig, VisionConfig
from model.names import table_name
from model.released.check import model_shapes, weights_problems


def test_shapes_come_without_memory(pristine) -> None:
    shapes = model_shapes(pristine.config, tables=True)
    assert shapes == {name: tuple(t.shape) for name, t in pristine.decoded.items()}
    without = model_shapes(pristine.config, tables=False)
    assert shapes.keys() - without.keys() == {table_name(1), table_name(3)}


def test_what_may_differ(pristine) -> None:
    c = pristine.config
    for change in (
        {"num_hidden_layers": 4},
        {"compress_ratios": c.compress_ratios[:6]},
        {"candidate_source_layer_id": None},
        {"qat": QatConfig(main_fp4=False), "workspace_mb": 7, "dtype": "bfloat16"},
        {"engram": EngramStoreConfig("mapped", "x"), "weights": "y"},
        {"vision": VisionConfig(num_hidden_layers=0, hidden_size=3)},
    ):
        assert weights_problems(pristine.path, replace(c, **change), tables=True) == [], change


def test_what_may_not(pristine) -> None:
    other = replace(
        pristine.config, rope_theta=1e6, sliding_window=9, index_source_layer_ids=(2, 4)
    )
    found = weights_problems(pristine.path, other, tables=True)
    assert found[:3] == [
        "config.json has sliding_window=8, this model 9",
        "config.json has index_source_layer_ids=[2, 4, 5], this model [2, 4]",
        "config.json has rope_theta=10000.0, this model 1000000.0",
    ]
    assert found[3] == "layers.5.attn.indexer.weights_proj.weight belongs to no part of this model"


def test_config_and_files_are_judged_together(small) -> None:
    document = json.loads((small.path / "config.json").read_text())
    document["text_config"]["swiglu_limit"] = 7.0
    (small.path / "config.json").write_text(json.dumps(document))
    small.shard(3).unlink()
    found = weights_problems(small.path, small.config, tables=True)
    assert found[0] == "config.json has swiglu_limit=7.0, this model 10.0"
    assert len(found) == 2 and found[1].startswith("model-00003-of-00003.safetensors is missing")
    (small.path / "config.json").write_text("{}")
    (found, _) = weights_problems(small.path, small.config, tables=True)
    assert found.startswith("config.json: config.json holds no text_config")
    (small.path / "config.json").unlink()
    assert len(weights_problems(small.path, small.config, tables=True)) == 1
