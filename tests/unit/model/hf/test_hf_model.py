"""The model under transformers' interface, against the reference cases and against itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from model.config import ModelConfig
from model.hf import DeepseekV41Config, DeepseekV41ForCausalLM

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture(scope="module")
def opened() -> DeepseekV41ForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "tiny_text")
    assert isinstance(model, DeepseekV41ForCausalLM)
    return model


def prompt(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_the_released_configuration_survives():
    document = json.loads((GOLDEN / "tiny_text" / "config.json").read_text())
    config = AutoConfig.from_pretrained(GOLDEN / "tiny_text")
    assert isinstance(config, DeepseekV41Config)
    assert document["text_config"].items() <= config.to_dict()["text_config"].items()

    def built(config: DeepseekV41Config) -> ModelConfig:
        return replace(config.architecture(), carried=())

    wanted = replace(ModelConfig.from_released(document), carried=())
    again = DeepseekV41Config.from_dict(json.loads(config.to_json_string()))
    assert built(config) == built(again) == wanted
    assert built(DeepseekV41Config.from_architecture(config.architecture())) == wanted


def test_padded_rows_give_the_reference_logits_and_loss(opened):
    given = load_file(GOLDEN / "tiny_text" / "inputs.safetensors")
    wanted = load_file(GOLDEN / "tiny_text" / "outputs.safetensors")
    out = opened(given["input_ids"], attention_mask=given["attention_mask"], labels=given["labels"])
    live = given["attention_mask"] > 0
    error = (out.logits - wanted["logits"])[live].norm() / wanted["logits"][live].norm()
    assert error < 1e-4
    assert out.loss.item() == pytest.approx(wanted["loss"].item(), rel=1e-4)


def test_packed_rows_give_the_reference_logits_and_loss():
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "tiny_packed")
    given = load_file(GOLDEN / "tiny_packed" / "inputs.safetensors")
    wanted = load_file(GOLDEN / "tiny_packed" / "outputs.safetensors")
    ids = given["input_ids"]
    out = model(ids, seq_lens=given["seq_lens"], labels=ids)
    error = (out.logits - wanted["logits"]).norm() / wanted["logits"].norm()
    assert error < 1e-4
    assert out.loss.item() == pytest.approx(wanted["loss"].item(), rel=1e-4)


def test_the_loss_has_gradients_for_the_parameters(opened):
    ids = prompt([0, 7, 8, 9, 10, 11])
    opened(ids, labels=ids).loss.backward()
    assert opened.get_input_embeddings().weight.grad[7].abs().sum() > 0
    assert opened.get_output_embeddings().weight.grad.abs().sum() > 0
    opened.zero_grad()


def test_logits_to_keep_as_a_count_and_as_columns(opened):
    ids = prompt([0, 7, 8, 9, 10, 11], [0, 5, 6, 7, 8, 9])
    every = opened(ids).logits
    assert torch.equal(opened(ids, logits_to_keep=2).logits, every[:, -2:])
    columns = torch.tensor([0, 4])
    assert torch.equal(opened(ids, logits_to_keep=columns).logits, every[:, columns])
    with pytest.raises(ValueError, match="logits_to_keep=-1"):
        opened(ids, logits_to_keep=-1)


def test_hidden_states(opened):
    ids = prompt([0, 7, 8, 9, 10, 11])
    out = opened(ids, return_hidden_states=True, output_hidden_states=True)
    assert out.logits is None
    assert len(out.hidden_states) == opened.architecture.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[0], opened.get_input_embeddings()(ids))
    assert torch.equal(opened.model.norm(out.hidden_states[-1]), out.last_hidden_state)
    assert torch.equal(opened.model.head(out.last_hidden_state[0], None), opened(ids).logits[0])


def test_target_features_are_what_enters_attention(opened):
    ids = prompt([0, 7, 8, 9])
    seen = []
    modules = opened.target_feature_modules([0, 2])
    hook = modules[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean(1)))
    opened(ids)
    hook.remove()
    # Streams enter layer 0 as copies of the embedding (no Engram there).
    assert torch.allclose(seen[0][:4], opened.get_input_embeddings()(ids)[0])
    for bad, message in (([2, 2], "strictly increasing"), ([0, 99], "do not exist")):
        with pytest.raises(ValueError, match=message):
            opened.target_feature_modules(bad)


def test_generation_follows_the_logits_whatever_the_padding(opened):
    ids = prompt([0, 7, 8, 9])
    longer = opened.generate(ids, max_new_tokens=5, do_sample=False)
    expected = ids
    for _ in range(5):
        following = opened(expected).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, following], 1)
    assert longer.tolist() == expected[:, : longer.shape[1]].tolist()
    padded = torch.tensor([[2, 2, *ids[0].tolist()], [0, 5, 6, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    both = opened.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert both[0, 2 : 2 + longer.shape[1]].tolist() == longer[0].tolist()


def test_a_new_model_is_a_function_of_its_seed_and_asks_for_its_tokenizer(opened):
    config = AutoConfig.from_pretrained(GOLDEN / "tiny_text")
    one, same = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    ids = prompt([0, 7, 8, 9])
    with pytest.raises(ValueError, match="use_tokenizer"):
        one(ids)
    one.token_map = same.token_map = opened.token_map
    assert torch.equal(one(ids).logits, same(ids).logits)


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_saved_model_opens_as_the_same(opened, tmp_path, from_scratch):
    model = opened
    if from_scratch:
        model = DeepseekV41ForCausalLM.from_config(opened.config, seed=5)
        model.use_tokenizer(opened.tokenizer)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = prompt([0, 7, 8, 9, 10, 11])
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_with_a_missing_tensor_is_refused_by_name(tmp_path):
    from safetensors.torch import save_file

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((GOLDEN / "tiny_text" / name).read_bytes())
    tensors = load_file(GOLDEN / "tiny_text" / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
