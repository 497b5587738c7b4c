"""Where a case's tokens come to stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launcher.verify.case import CaseError, Tensors, Unsupported
from launcher.verify.documents import place
from model.config import ModelConfig

IGNORED = -100


@pytest.fixture
def config(golden: Path) -> ModelConfig:
    document = json.loads((golden / "tiny_packed" / "config.json").read_text())
    found = ModelConfig.from_released(document)
    assert (found.alignment, found.pad_token_id) == (2, 2)
    return found


def inputs(**tensors: Tensor) -> Tensors:
    return Tensors(Path("inputs.safetensors"), tensors)


def test_documents_start_at_even_columns_and_labels_stay_inside(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 12, 13, 21, 31, 32, 2, 2]])
    labels = torch.where(ids == 2, IGNORED, ids)
    found = place(inputs(input_ids=ids, labels=labels, seq_lens=torch.tensor([[3, 1, 2]])), config)
    assert found.inputs.input_ids.tolist() == [[11, 12, 13, 2, 21, 2, 31, 32]]
    assert found.inputs.seq_ids.tolist() == [[1, 1, 1, 0, 2, 0, 3, 3]]
    assert found.inputs.position_ids.tolist() == [[0, 1, 2, 0, 0, 0, 0, 1]]
    assert found.labels.tolist() == [[12, 13] + [IGNORED] * 4 + [32, IGNORED]]
    assert found.case_column.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.column.tolist() == [0, 1, 2, 4, 6, 7]
    assert torch.equal(found.inputs.input_ids[found.row, found.column], ids[0, :6])


def test_alignment_may_widen_the_rows(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 21, 31], [41, 42, 43]])
    lens = torch.tensor([[1, 1, 1], [3, 0, 0]])
    found = place(inputs(input_ids=ids, labels=ids, seq_lens=lens), config)
    assert found.inputs.input_ids.tolist() == [[11, 2, 21, 2, 31, 2], [41, 42, 43, 2, 2, 2]]


def test_a_mask_makes_one_document_a_row(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 12, 13], [21, 2, 2]])
    mask = (ids != 2).long()
    labels = torch.where(ids == 2, IGNORED, ids)
    found = place(inputs(input_ids=ids, labels=labels, attention_mask=mask), config)
    assert found.inputs.seq_ids.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert found.labels.tolist() == [[12, 13, IGNORED, IGNORED], [IGNORED] * 4]
    assert list(zip(found.row.tolist(), found.column.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]


def test_without_a_mask_every_token_is_live(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 2, 13, 14]])
    found = place(inputs(input_ids=ids, labels=ids), config)
    assert found.inputs.seq_ids.tolist() == [[1, 1, 1, 1]]


def test_masked_labels_stay_masked(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 12, 13, 14]])
    labels = torch.tensor([[11, IGNORED, 13, 14]])
    found = place(inputs(input_ids=ids, labels=labels), config)
    assert found.labels.tolist() == [[IGNORED, 13, 14, IGNORED]]


def test_unknown_inputs_and_left_padding_are_not_supported(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 12, 13, 14]])
    with pytest.raises(Unsupported, match="sounds"):
        place(inputs(input_ids=ids, labels=ids, sounds=ids), config)
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(Unsupported, match="padding before tokens"):
        place(inputs(input_ids=ids, labels=ids, attention_mask=mask), config)


def test_ids_outside_the_vocabulary_are_named(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 12, 13, 14]])
    wrong = torch.tensor([[11, config.vocab_size, 13, 14]])
    with pytest.raises(CaseError, match="input_ids holds 448"):
        place(inputs(input_ids=wrong, labels=ids), config)
    with pytest.raises(CaseError, match="input_ids holds -100"):
        place(inputs(input_ids=torch.full_like(ids, IGNORED), labels=ids), config)
    with pytest.raises(CaseError, match="labels holds 448"):
        place(inputs(input_ids=ids, labels=wrong), config)


def test_contradictions_are_named(config: ModelConfig) -> None:
    ids = torch.tensor([[11, 12, 13, 14]])
    with pytest.raises(CaseError, match="rows of one shape"):
        place(inputs(input_ids=ids, labels=ids[:, :3]), config)
    with pytest.raises(CaseError, match="rows of 4"):
        place(inputs(input_ids=ids, labels=ids, seq_lens=torch.tensor([[3, 2]])), config)
    with pytest.raises(CaseError, match="rows of 4"):
        place(inputs(input_ids=ids, labels=ids, attention_mask=torch.zeros_like(ids)), config)
