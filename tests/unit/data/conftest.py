"""A small model that fits the small tokenizer, and ways to write data files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import DataConfig
from data.engram import RowHasher
from model.config import ModelConfig

TOKENIZER = str(Path(__file__).parents[2] / "golden" / "tokenizer.json")


def small_model(**changes) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 448,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": (0, 0, 4, 1),
        "kv_source_layer_ids": (2, 3),
        "index_source_layer_ids": (2, 3),
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "engram_layer_ids": (1, 3),
        "engram_num_embeddings": (384, 552),
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_vocab_size": 50,
        "engram_head_dim": 16,
        "engram_compressed_vocab_size": 323,
    }
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    """Alignment 4, two Engram layers of six columns, vocabulary 448."""
    return small_model()


@pytest.fixture(scope="session")
def make_model():
    return small_model


@pytest.fixture(scope="session")
def hasher(model) -> RowHasher:
    found = RowHasher.for_model(model, tokenizer=TOKENIZER)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def make_data():
    def make(**changes) -> DataConfig:
        given: dict[str, Any] = {"source": "embedded", "pack_length": 64, "tokenizer": TOKENIZER}
        return DataConfig(**(given | changes))

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    def write(*lines, name: str = "corpus.jsonl") -> Path:
        """Lines as bytes or text are written as they are; anything else as JSON."""
        path = tmp_path / name
        raw = []
        for line in lines:
            if isinstance(line, bytes):
                raw.append(line)
            else:
                text = line if isinstance(line, str) else json.dumps(line)
                raw.append(text.encode())
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        return path

    return write


@pytest.fixture(scope="session")
def random_documents():
    def make(lengths, *, seed: int = 0):
        """(tokens, offsets) of documents of these lengths with random ids of the tokenizer."""
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        rng = np.random.default_rng(seed)
        return rng.integers(3, 400, int(offsets[-1]), dtype=np.int32), offsets

    return make
