"""Configuration that cannot work is named with its fix."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.config import DataConfig, FieldsConfig, MixtureSource
from data.corpus import data_problems, load_corpus
from model.config import VisionConfig

TOKENIZER = Path(__file__).parents[2] / "golden" / "tokenizer.json"


def only(problems: list[str]) -> str:
    assert len(problems) == 1, problems
    return problems[0]


def test_defaults_are_sound(model, make_data):
    assert data_problems(make_data(), model) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "csv"}, ["data.source=csv", "embedded, hf, jsonl"]),
        ({"source": "hf"}, ["data.source=hf", "one dataset in data.paths"]),
        ({"source": "hf", "paths": ("a", "b")}, ["not 2", "data=mixture"]),
        ({"source": "hf", "paths": ("a",), "split": ""}, ["data.split", "train"]),
        ({"subset": "en"}, ["data.subset=en", "data.source=hf only"]),
        ({"kind": "poem"}, ["data.kind=poem", "chat, image_chat, pretrain"]),
        ({"kind": "image_chat"}, ["data.kind=image_chat", "jsonl, parquet or hf"]),
        ({"source": "pictures"}, ["data.source=pictures", "data.kind=image_chat"]),
        ({"image_folder": "x"}, ["data.image_folder=x", "data.kind=image_chat only"]),
        (
            {"source": "pictures", "kind": "image_chat", "fields": FieldsConfig(images="")},
            ["data.fields.images is empty"],
        ),
        ({"kind": "chat"}, ["data.kind=chat", "jsonl, parquet or hf"]),
        ({"max_document_length": 1}, ["data.max_document_length=1"]),
        (
            {"source": "jsonl", "paths": ("x",), "kind": "chat", "max_document_length": 9},
            ["data.on_long_document=split", "drop or refuse"],
        ),
        ({"source": "mixture"}, ["data.source=mixture needs data.mixture"]),
        ({"cache_dir": ""}, ["data.cache_dir"]),
        ({"processes": 0}, ["data.processes=0"]),
        ({"window_documents": 0}, ["data.window_documents=0"]),
        ({"source": "jsonl"}, ["data.source=jsonl", "data.paths"]),
        ({"source": "text"}, ["data.source=text", "data.paths"]),
        ({"paths": ("a.txt",)}, ["a.txt", "drop data.paths"]),
        ({"source": "text", "paths": ("",)}, ["empty path"]),
        ({"fields": FieldsConfig(text="")}, ["data.fields.text"]),
        ({"tokenizer": ""}, ["data.tokenizer", "deepseek"]),
        ({"holdout": 1.0}, ["data.holdout=1.0"]),
        ({"holdout": -0.1}, ["data.holdout=-0.1"]),
        ({"holdout": float("nan")}, ["data.holdout=nan"]),
        ({"workers": -1}, ["data.workers=-1"]),
        ({"pack_length": 1}, ["data.pack_length=1", "2 or more"]),
    ],
)
def test_each_rule_names_key_and_fix(make_data, changes, words):
    problem = only(make_data(**changes).problems())
    assert all(word in problem for word in words)


def test_all_problems_come_at_once(model):
    data = DataConfig(
        source="jsonl",
        pack_length=6,
        fields=FieldsConfig(text=""),
        holdout=2.0,
        tokenizer="none.json",
    )
    problems = "\n".join(data_problems(data, model))
    for key in (
        "data.paths",
        "data.pack_length=6",
        "data.fields.text",
        "data.holdout",
        "none.json",
    ):
        assert key in problems
    with pytest.raises(ValueError, match=r"(?s)data\.paths.*none\.json"):
        load_corpus(data, model, seed=0)


def test_a_mixture_names_the_source_that_is_wrong(make_data):
    mixture = {
        "web": MixtureSource(source="jsonl", weight=0.0),
        "code": MixtureSource(source="text", paths=("x",), weight=1.0, epochs=0),
        "on": MixtureSource(source="embedded", weight=1.0),
    }
    data = make_data(source="mixture", mixture=mixture, kind="chat")
    assert [problem.split(" ")[0] for problem in data.problems()] == [
        "data.kind=chat",
        "data.mixture.on:",
        "data.mixture.web.source=jsonl",
        "data.mixture.web.weight=0.0",
        "data.mixture.code.epochs=0",
    ]
    unread = make_data(mixture=mixture).problems()
    assert unread[0].startswith("data.mixture (web, code, on) is not read by data.source=embedded")


def test_chat_needs_a_tokenizer_that_knows_its_form(make_data, model):
    data = make_data(source="jsonl", paths=("x",), kind="chat")
    problem = only(data_problems(data, model))
    assert "data.kind=chat" in problem
    assert "<｜User｜>" in problem
    assert "data.tokenizer=deepseek" in problem


def seeing(make_model, **changes):
    tower = VisionConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=8
    )
    return make_model(vision=tower, image_token_id=3, **changes)


def test_images_need_a_model_that_sees(make_data, make_model, chat_tokenizer):
    data = make_data(source="pictures", kind="image_chat", tokenizer=str(chat_tokenizer))
    problem = only(data_problems(data, make_model(engram_compressed_vocab_size=328)))
    assert "model.vision.num_hidden_layers=0" in problem
    assert "model=tiny_image" in problem
    assert data_problems(data, seeing(make_model, engram_compressed_vocab_size=328)) == []


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (40, ["model.image_token_id=40", "no mark of an image", "'<image>' = 3"]),
        (1, ["model.image_token_id=1", "'<eos>'"]),
        (401, ["model.image_token_id=401 is no token", "400"]),
    ],
)
def test_an_image_token_that_the_tokenizer_has_for_something_else(
    make_data, make_model, token, words
):
    problem = only(data_problems(make_data(), replace(seeing(make_model), image_token_id=token)))
    assert all(word in problem for word in words)
    assert data_problems(make_data(), replace(make_model(), image_token_id=token)) == []


def test_pack_length_below_the_alignment(model, make_data):
    problem = only(make_data(pack_length=2).model_problems(model))
    assert "data.pack_length=2 is below" in problem
    assert "use 4 or a multiple" in problem


def test_pack_length_off_the_alignment_names_both_neighbours(model, make_data):
    problem = only(make_data(pack_length=30).model_problems(model))
    assert "use 28 or 32" in problem
    assert make_data(pack_length=32).model_problems(model) == []


def test_a_tokenizer_with_another_compressed_size(make_data, make_model):
    model = make_model(engram_compressed_vocab_size=322)
    problem = only(data_problems(make_data(), model))
    assert "323" in problem
    assert "322" in problem
    no_engram = replace(model, engram_layer_ids=(), engram_num_embeddings=())
    assert data_problems(make_data(), no_engram) == []


def test_a_tokenizer_larger_than_the_vocabulary(make_data, make_model):
    problem = only(data_problems(make_data(), make_model(vocab_size=399)))
    assert "400" in problem
    assert "399" in problem


def test_a_tokenizer_with_gaps_in_its_ids(make_data, model, tmp_path):
    spec = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    last = max(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    spec["model"]["vocab"][last] = 420
    path = tmp_path / "gaps.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    problem = only(data_problems(make_data(tokenizer=str(path)), model))
    assert "400" in problem
    assert "420" in problem


def test_a_special_token_past_the_tokenizer(make_data, make_model):
    problem = only(data_problems(make_data(), make_model(pad_token_id=400)))
    assert "model.pad_token_id=400" in problem


def test_a_tokenizer_file_that_is_none(make_data, model, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}", encoding="utf-8")
    problem = only(data_problems(make_data(tokenizer=str(path)), model))
    assert str(path) in problem
    assert "tokenizer.json of the tokenizers library" in problem
