"""One forward and backward of a model case on this installation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.tokenizer import load_token_map
from launcher.verify.case import Case, CaseError, Tensors
from launcher.verify.documents import Documents, place
from launcher.verify.imposed import imposing
from launcher.verify.trace import tracing
from model.config import ModelConfig, QatConfig
from model.engram.hashing import HashGeometry, hash_rows
from model.engram.owners import OwnerStore
from model.engram.token_map import check_compressed_size, compress
from model.loss import IGNORED
from model.names import released_gradients
from model.released.errors import WeightsError
from model.released.load import load_folder, tables_of, targets_of
from model.transformer import DeepseekV41


@dataclass(frozen=True)
class Run:
    """Everything there is to compare, under the reference's names.

    `outputs`: what layers gave and `engram_rows.N`, [B, W, ...] in aligned columns; `logits`
    [B, W, V]; `loss` [1], the mean over labels; `gradients` of that mean by released name.
    """

    documents: Documents
    outputs: dict[str, Tensor]
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def run(case: Case, *, impose: Tensors | None = None) -> Run:
    """Compute a case. Unsupported or CaseError when it asks for what is not here or is unsound.

    `impose`: the reference outputs whose selections the model is to take. The run's own ones are
    in its outputs all the same.
    """
    config = _config(case)
    if (dtype := case.document.get("dtype", "float32")) != config.dtype:
        raise CaseError(f"{case.folder}: dtype {dtype} in case.json, {config.dtype} in config.json")
    documents = place(case.tensors("inputs.safetensors"), config)
    rows = engram_rows(case, documents, config)
    model, store = DeepseekV41(config), OwnerStore(config, seed=None)
    _load(case, model, store)

    window = store.open_window([rows])
    with imposing(model, impose, documents.inputs) as selections:
        with tracing(model, documents.inputs) as trace:
            try:
                out = model(documents.inputs, engram=window.rows(0), labels=documents.labels)
            except ValueError as error:  # images that do not fit their spans
                raise CaseError(f"{case.folder}: {error}") from None
        loss = out.loss_sum / (documents.labels != IGNORED).sum()
        loss.backward()
        with torch.no_grad():
            logits = model(documents.inputs, engram=window.rows(0)).logits
    trace.outputs |= selections
    for index, layer in enumerate(store.layers):
        trace.outputs[f"engram_rows.{layer}"] = rows[:, :, index]
    return Run(
        documents=documents,
        outputs=trace.outputs,
        logits=logits,
        loss=loss.detach().reshape(1),
        gradients=released_gradients(model, store, window),
    )


def engram_rows(case: Case, documents: Documents, config: ModelConfig) -> Tensor:
    """Table rows of every token by the case's own tokenizer: [B, W, Engram layers, columns]."""
    inputs = documents.inputs
    if not config.engram_layers:
        return torch.zeros(*inputs.input_ids.shape, 0, 0, dtype=torch.int64)
    if not case.has("tokenizer.json"):
        raise CaseError(f"{case.folder / 'tokenizer.json'} is missing")
    try:
        token_map = load_token_map(str(case.folder / "tokenizer.json"))
        check_compressed_size(token_map, expected=config.engram_compressed_vocab_size)
        rows = hash_rows(
            HashGeometry.from_config(config),
            compress(token_map, inputs.input_ids.numpy()),
            seq_ids=inputs.seq_ids.numpy(),
            live=(inputs.token_types < 0).numpy(),
            pad_id=int(token_map[config.engram_pad_token_id]),
        )
    except ValueError as error:
        raise CaseError(f"{case.folder}: {error}") from None
    return torch.from_numpy(rows)


def _config(case: Case) -> ModelConfig:
    quantised = case.document.get("qat", True)
    try:
        config = ModelConfig.from_released(case.json("config.json"))
        return replace(config, qat=QatConfig(quantised, quantised, quantised))
    except (ValueError, TypeError, AttributeError) as error:  # an entry of another type, too
        raise CaseError(f"{case.folder / 'config.json'}: {error}") from None


def _load(case: Case, model: DeepseekV41, store: OwnerStore) -> None:
    targets = [*targets_of(model), *tables_of(store)]
    try:
        load_folder(case.folder, targets, unread=lambda name: False)
    except WeightsError as error:
        raise CaseError(str(error)) from None
