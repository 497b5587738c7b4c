"""config.json and tokenizer files of an exported model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from model.config import ModelConfig
from model.released.documents import config_text, tokenizer_files


def exported(config: ModelConfig, source: Path | None, *, quantised: bool, draft: bool) -> dict:
    text = config_text(config, source=source, dtype="bfloat16", quantised=quantised, draft=draft)
    return json.loads(text)


def ran(config: ModelConfig) -> ModelConfig:
    """The model of a run: what its YAML says, without what only the released file carries."""
    return replace(config, carried=(), num_nextn_predict_layers=0, dtype="float32", workspace_mb=7)


def test_the_sources_own_text_when_it_says_the_same(small) -> None:
    file = small.path / "config.json"
    document = json.loads(file.read_text()) | {"dtype": "bfloat16"}
    document["text_config"]["dtype"] = "bfloat16"
    file.write_text(json.dumps(document))
    text = config_text(
        ran(small.config), source=small.path, dtype="bfloat16", quantised=True, draft=True
    )
    assert text == file.read_text()
    changed = replace(ran(small.config), swiglu_limit=7.0)
    found = exported(changed, small.path, quantised=True, draft=True)
    assert found["text_config"]["swiglu_limit"] == 7.0
    assert found["quantization_config"] == document["quantization_config"]
    assert found["text_config"]["dspark_noise_token_id"] == 5


def test_a_plain_copy_says_nothing_of_quantisation_or_drafts(pristine) -> None:
    found = exported(ran(pristine.config), pristine.path, quantised=False, draft=False)
    assert "quantization_config" not in found
    assert found["text_config"]["num_nextn_predict_layers"] == 0
    assert ModelConfig.from_released(found).rope_theta == pristine.config.rope_theta


def test_a_run_from_scratch_describes_its_own_quantisation(pristine) -> None:
    found = exported(ran(pristine.config), None, quantised=True, draft=False)
    assert found["quantization_config"]["weight_block_size"] == [32, 32]
    assert found["dtype"] == found["text_config"]["dtype"] == "bfloat16"
    assert ModelConfig.from_released(found).hidden_size == pristine.config.hidden_size


def test_tokenizers(pristine, golden_folder: Path) -> None:
    settings = {
        "tokenizer": golden_folder / "tokenizer.json",
        "tokens": {"bos_token": "<b>"},
        "max_length": 9,
    }
    files = tokenizer_files(pristine.path, **settings)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    for name, content in files.items():
        assert content == (pristine.path / name).read_bytes()
    own = tokenizer_files(None, **settings)
    assert own["tokenizer.json"] == (golden_folder / "tokenizer.json").read_bytes()
    assert json.loads(own["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 9,
        "bos_token": "<b>",
    }
