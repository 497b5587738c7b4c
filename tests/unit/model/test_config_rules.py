"""ModelConfig: rules, their messages, and the released config.json."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from model.config import ModelConfig, QatConfig, RopeScaling, VisionConfig
from model.rules import POSITIVE, BrokenRules

CASES = ["tiny_text", "tiny_text_noqat", "tiny_packed"]
VISION = VisionConfig(num_hidden_layers=2)

# (changes of a sound model, the message)
BROKEN = [
    ({"num_key_value_heads": 2}, r"num_key_value_heads=2: .*set 1"),
    ({"o_groups": 3}, r"num_attention_heads=8 is not divisible by o_groups=3"),
    ({"qk_rope_head_dim": 15}, r"qk_rope_head_dim=15 must be even"),
    ({"qk_rope_head_dim": 34, "index_head_dim": 64}, r"qk_rope_head_dim=34 exceeds head_dim=32"),
    ({"qk_rope_head_dim": 34, "head_dim": 64}, r"qk_rope_head_dim=34 exceeds index_head_dim=32"),
    ({"head_dim": 48}, r"head_dim=48 must be a multiple of 32"),
    ({"index_head_dim": 40}, r"index_head_dim=40 must be a multiple of 32"),
    ({"rope_scaling": RopeScaling(factor=0.5)}, r"rope_scaling needs factor >= 1"),
    ({"rope_scaling": RopeScaling(beta_fast=1.0)}, r"rope_scaling needs .*beta_fast > beta_slow"),
    ({"rope_scaling": RopeScaling(beta_slow=0.0)}, r"rope_scaling needs .*beta_slow > 0"),
    (
        {"rope_scaling": RopeScaling(original_max_position_embeddings=0)},
        r"rope_scaling needs .*original_max_position_embeddings > 0",
    ),
    ({"num_hidden_layers": 7}, r"compress_ratios has 6 entries for num_hidden_layers=7"),
    ({"compress_ratios": (-1, 0, 2, 2, 1, 1)}, r"may hold no negative ratio"),
    ({"engram_layer_ids": (3, 1)}, r"engram_layer_ids=\[3, 1\] must be strictly increasing"),
    ({"engram_layer_ids": (1, 1)}, r"engram_layer_ids=\[1, 1\] must be strictly increasing"),
    ({"engram_layer_ids": (-1, 1)}, r"engram_layer_ids=\[-1, 1\] must be .*layer numbers"),
    (
        {"index_source_layer_ids": (2, 5, 4)},
        r"index_source_layer_ids=\[2, 5, 4\] must be strictly increasing",
    ),
    (
        {"index_source_layer_ids": (1, 2, 4, 5)},
        r"layer 1 of index_source_layer_ids has compress ratio 0",
    ),
    (
        {"index_source_layer_ids": (2, 4, 5, 6)},
        r"layer 6 of index_source_layer_ids lies past the 6 compress_ratios",
    ),
    (
        {"index_source_layer_ids": (2, 3, 4, 5), "kv_source_layer_ids": (3, 4)},
        r"layer 2 \(ratio 2\) has no KV source at or before it",
    ),
    ({"kv_source_layer_ids": (2, 3, 4)}, r"KV sources \[3\] are missing from index_source"),
    (
        {"kv_source_layer_ids": (2,), "num_hidden_layers": 5},
        r"layer 4 has ratio 1 but its KV source, layer 2, has ratio 2",
    ),
    ({"candidate_source_layer_id": 3}, r"candidate_source_layer_id=3 is not among"),
    (
        {"candidate_source_layer_id": 2},
        r"KV sources \[4\] come after candidate_source_layer_id=2",
    ),
    ({"index_topk": 13}, r"candidate_block_size = 12 is below index_topk=13"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok=9 exceeds n_routed_experts=8"),
    ({"n_shared_experts": 2}, r"n_shared_experts=2: .*set 1"),
    ({"norm_topk_prob": False}, r"norm_topk_prob=false: .*set true"),
    ({"engram_num_embeddings": (384,)}, r"has 1 row counts for 2 engram_layer_ids"),
    ({"engram_max_ngram_size": 1}, r"engram_max_ngram_size=1 must be at least 2"),
    ({"engram_compressed_vocab_size": 449}, r"engram_compressed_vocab_size=449 must lie in 1\.\.v"),
    ({"engram_n_heads": 0}, r"engram_n_heads=0 must be positive"),
    ({"bos_token_id": 448}, r"bos_token_id=448 lies outside the vocabulary of 448"),
    ({"eos_token_id": -1}, r"eos_token_id=-1 lies outside the vocabulary"),
    ({"pad_token_id": 999}, r"pad_token_id=999 lies outside the vocabulary"),
    ({"engram_pad_token_id": 448}, r"engram_pad_token_id=448 lies outside the vocabulary"),
    ({"vision": VISION, "image_token_id": 448}, r"image_token_id=448 lies outside"),
    ({"vision": VisionConfig(num_hidden_layers=-1)}, r"vision\.num_hidden_layers=-1 must be 0"),
    ({"vision": replace(VISION, num_attention_heads=7)}, r"vision\.hidden_size=1024 is not div"),
    ({"vision": replace(VISION, hidden_size=32)}, r"vision head width must be a multiple of 4"),
    ({"vision": replace(VISION, patch_size=0)}, r"vision\.patch_size=0 must be positive"),
    ({"vision": replace(VISION, max_image_tokens=3)}, r"vision\.max_image_tokens=3 "),
    ({"vision": replace(VISION, max_wh_ratio=0.0)}, r"vision\.max_wh_ratio=0\.0 must be positive"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_a_broken_rule_gives_its_own_message_alone(
    make_config: Callable, changes: dict, message: str
) -> None:
    with pytest.raises(BrokenRules) as caught:
        make_config(**changes)
    (problem,) = caught.value.problems
    assert re.search(message, problem)


@pytest.mark.parametrize("name", POSITIVE)
def test_sizes_must_be_positive(make_config: Callable, name: str) -> None:
    with pytest.raises(BrokenRules) as caught:
        make_config(**{name: 0})
    assert caught.value.problems == [f"{name}=0 must be positive"]


def test_all_broken_rules_come_at_once(make_config: Callable) -> None:
    with pytest.raises(ValueError, match="do not fit together") as caught:
        make_config(
            o_groups=3,
            num_experts_per_tok=9,
            bos_token_id=448,
            engram_layer_ids=(3, 1),
            candidate_source_layer_id=3,
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 5
    words = ("o_groups", "engram_layer_ids", "candidate_", "experts", "bos")
    for word, line in zip(words, lines[1:], strict=True):
        assert word in line
    with pytest.raises(BrokenRules) as small:
        make_config(o_groups=0, hidden_size=-1)
    assert len(small.value.problems) == 2


def test_engram_rules_are_silent_without_engram(make_config: Callable) -> None:
    none = {"engram_layer_ids": (), "engram_num_embeddings": ()}
    config = make_config(
        **none, engram_n_heads=0, engram_compressed_vocab_size=0, engram_pad_token_id=9999
    )
    assert config.problems() == []
    assert config.engram_layers == ()


def test_fewer_layers_keep_their_roles(make_config: Callable) -> None:
    config = make_config(num_hidden_layers=3)
    assert config.problems() == []
    assert [config.role(n) for n in range(3)] == ["window", "window", "source"]
    assert config.active_ratios == (2,) and config.alignment == 2
    assert config.engram_layers == (1,)


def test_the_released_schedule_is_sound(make_config: Callable) -> None:
    """40 layers; the ratios of the three draft blocks follow behind."""
    config = make_config(
        num_hidden_layers=40,
        compress_ratios=(0, 0) + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        candidate_source_layer_id=20,
        engram_layer_ids=(1, 14),
    )
    roles = [config.role(n) for n in range(40)]
    assert [roles.count(r) for r in ("window", "source", "reindex", "reuse")] == [2, 4, 4, 32 - 2]
    assert [n for n in range(40) if config.uses_candidates(n)] == [24, 28, 32, 36]
    assert config.active_ratios == (1, 2)


def test_roles_and_candidates(make_config: Callable) -> None:
    config = make_config()
    roles = [config.role(n) for n in range(6)]
    assert roles == ["window", "window", "source", "reuse", "source", "reindex"]
    assert [config.uses_candidates(n) for n in range(6)] == [False] * 5 + [True]
    assert config.engram_columns == 6
    none = make_config(candidate_source_layer_id=None)
    assert not any(none.uses_candidates(n) for n in range(6))


def test_alignment_is_the_common_multiple(make_config: Callable) -> None:
    config = make_config(
        num_hidden_layers=4,
        compress_ratios=(0, 4, 6, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=None,
    )
    assert config.alignment == 12
    window = make_config(
        num_hidden_layers=2,
        compress_ratios=(0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=None,
        engram_layer_ids=(1,),
        engram_num_embeddings=(384,),
    )
    assert window.alignment == 1 and window.active_ratios == ()


def read(golden: Path, case: str) -> dict:
    return json.loads((golden / case / "config.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_released_files_come_back_whole(golden_folder: Path, case: str) -> None:
    document = read(golden_folder, case)
    config = ModelConfig.from_released(document)
    again = config.to_released()
    assert ModelConfig.from_released(json.loads(json.dumps(again))) == config

    def inside(part: dict, whole: dict) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                inside(value, whole[key])
            else:
                assert whole[key] == value, key

    inside(document, again)


def test_our_own_settings_are_no_part_of_the_file(make_config: Callable) -> None:
    config = make_config(workspace_mb=5, qat=QatConfig(False, True, False))
    again = ModelConfig.from_released(config.to_released())
    assert again.workspace_mb == 48 and again.qat == QatConfig()
    assert replace(again, workspace_mb=5, qat=config.qat) == config


def test_a_vision_tower_comes_back(make_config: Callable) -> None:
    config = make_config(vision=replace(VISION, max_wh_ratio=2.5))
    assert ModelConfig.from_released(config.to_released()).vision == config.vision


def test_unknown_missing_and_contradicting_entries_all_at_once(golden_folder: Path) -> None:
    document = read(golden_folder, "tiny_text")
    text = document["text_config"]
    text["hiden_size"] = text.pop("hidden_size")
    text["rope_scaling"]["beta_fats"] = 3
    text["hidden_act"] = "gelu"
    document["colour"] = "red"
    document["vision_config"]["patch_sizes"] = 14
    document["dtype"] = "bfloat16"
    with pytest.raises(ValueError, match="cannot be used") as caught:
        ModelConfig.from_released(document)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(lines) == sorted(
        [
            "text_config.hiden_size is not an entry of this format; did you mean hidden_size?",
            "text_config.rope_scaling.beta_fats is not an entry of this format; "
            "did you mean beta_fast?",
            "text_config.hidden_act='gelu': this model needs 'silu'",
            "colour is not an entry of this format",
            "vision_config.patch_sizes is not an entry of this format; did you mean patch_size?",
            "dtype=bfloat16 but text_config.dtype=float32",
            "text_config.hidden_size is missing",
        ]
    )


def test_a_document_of_another_kind(golden_folder: Path) -> None:
    with pytest.raises(ValueError, match="no text_config"):
        ModelConfig.from_released({"hidden_size": 3})
    document = copy.deepcopy(read(golden_folder, "tiny_text"))
    document["model_type"] = "llama"
    with pytest.raises(ValueError, match="model_type='llama': this model needs 'deepseek_v41'"):
        ModelConfig.from_released(document)


def test_entries_of_others_are_carried(golden_folder: Path) -> None:
    document = read(golden_folder, "tiny_text")
    document["quantization_config"] = {"fmt": "e4m3", "block": [32, 32]}
    document["text_config"]["dspark_block_size"] = 5
    config = ModelConfig.from_released(document)
    again = config.to_released()
    assert again["quantization_config"] == {"fmt": "e4m3", "block": [32, 32]}
    assert again["text_config"]["dspark_block_size"] == 5
    assert hash(config) == hash(ModelConfig.from_released(document))
