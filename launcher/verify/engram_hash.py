"""Kind `engram_hash`: token map, hash constants and table rows, exactly.

The tokenizer is the folder's tokenizer.json, or the released one; the geometry is the folder's
config.json, or the released one with the table sizes that case.json states.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from data.tokenizer import RELEASED, load_token_map, load_tokenizer
from launcher.verify.case import Case, CaseError, Tensors
from launcher.verify.gates import Check, exact
from model.config import ModelConfig
from model.engram.hashing import HashGeometry, hash_rows
from model.engram.token_map import compress

# Rows by what may block the look-back: documents, dead tokens.
ROWS = {
    "rows_plain": (False, False),
    "rows_packed": (True, False),
    "rows_masked": (False, True),
    "rows_packed_masked": (True, True),
}


def check(case: Case) -> list[Check]:
    """Compare every reference tensor of the case, its text's token ids and its token map's hash."""
    tensors = case.tensors("hash.safetensors")
    tokenizer = str(case.folder / "tokenizer.json") if case.has("tokenizer.json") else RELEASED
    try:
        config = _config(case)
        token_map = load_token_map(tokenizer)
        geometry = HashGeometry.from_config(config)
        pad_id = int(token_map[config.engram_pad_token_id])
        return [
            *_token_map(case, tensors, token_map),
            *_text(case, tokenizer),
            *_constants(case, tensors, geometry, pad_id),
            *_rows(tensors, geometry, token_map, pad_id),
        ]
    except ValueError as error:
        raise CaseError(f"{case.folder}: {error}") from None


def released_geometry(*, table_rows: list[int], compressed_vocab_size: int) -> ModelConfig:
    """The released Engram settings. The backbone is as small as the rules allow: rows of a table
    do not depend on it."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=32,
        num_hidden_layers=15,
        num_attention_heads=1,
        head_dim=32,
        qk_rope_head_dim=2,
        q_lora_rank=1,
        o_groups=1,
        o_lora_rank=1,
        moe_intermediate_size=1,
        n_routed_experts=1,
        num_experts_per_tok=1,
        sliding_window=1,
        compress_ratios=(0,) * 15,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        index_n_heads=1,
        index_head_dim=32,
        index_topk=1,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=tuple(table_rows),
        engram_max_ngram_size=4,
        engram_vocab_size=16000000,
        engram_n_heads=8,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=compressed_vocab_size,
    )


def _config(case: Case) -> ModelConfig:
    if case.has("config.json"):
        return ModelConfig.from_released(case.json("config.json"))
    return released_geometry(
        table_rows=case.entry("table_rows"),
        compressed_vocab_size=case.entry("compressed_vocab_size"),
    )


def _token_map(case: Case, tensors: Tensors, token_map: np.ndarray) -> list[Check]:
    ours = torch.tensor(token_map)
    checks = [exact("token map", "token_map", ours, tensors["token_map"])]
    size = int(token_map.max()) + 1
    checks.append(_same("token map", "compressed_vocab_size", size, case))
    if "token_map_sha256" in case.document:
        digest = hashlib.sha256(token_map.astype(np.int32).tobytes()).hexdigest()
        checks.append(_same("token map", "token_map_sha256", digest, case))
    return checks


def _text(case: Case, tokenizer: str) -> list[Check]:
    if "text_ids" not in case.document:
        return []
    text = "\n\n".join(case.document["text"])
    ids = load_tokenizer(tokenizer).encode(text, add_special_tokens=False)
    reference = torch.tensor(case.document["text_ids"])
    return [exact("text ids", "text_ids", torch.tensor(ids), reference)]


def _constants(case: Case, tensors: Tensors, geometry: HashGeometry, pad_id: int) -> list[Check]:
    group = "constants"
    return [
        *(
            exact(group, name, torch.from_numpy(getattr(geometry, name)), tensors[name])
            for name in ("primes", "offsets", "multipliers")
        ),
        _same(group, "table_rows", list(geometry.rows_per_layer), case),
        _same(group, "pad_row_id", pad_id, case),
    ]


def _rows(
    tensors: Tensors, geometry: HashGeometry, token_map: np.ndarray, pad_id: int
) -> list[Check]:
    ids = compress(token_map, tensors["input_ids"].numpy())
    checks = []
    for name, (packed, masked) in ROWS.items():
        if name in tensors:
            ours = hash_rows(
                geometry,
                ids,
                seq_ids=tensors["sequence_ids"].numpy() if packed else None,
                live=tensors["token_mask"].numpy() if masked else None,
                pad_id=pad_id,
            )
            checks.append(exact("rows", name, torch.from_numpy(ours), tensors[name]))
    return checks


def _same(group: str, name: str, ours: object, case: Case) -> Check:
    """An entry of case.json is equal."""
    reference = case.entry(name)
    differ = int(ours != reference)
    return Check(group, name, differ, differ == 0, f"exact: {ours} here, {reference} there", 1)
