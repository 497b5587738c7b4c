"""A small model that fits the small tokenizer, and ways to write data files."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from data.cache.encoded import Encoded
from data.cache.lock import lock_file, locked
from data.cache.prepared import PreparedSet
from data.cache.writer import SetWriter
from data.config import DataConfig
from data.documents import Document
from data.engram import RowHasher
from data.packs import PackedSet, PackSource
from data.plan.settings import PlanSettings
from data.plan.stored import StoredPlans
from model.config import ModelConfig, VisionConfig

MARKS = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
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


@pytest.fixture(scope="session", autouse=True)
def _not_durable():
    """Sets and plans are made by the hundred here; none must survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


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
def chat_tokenizer(tmp_path_factory) -> Path:
    """tokenizer.json of 405 tokens; the marks are 400 to 404."""
    spec = json.loads(Path(TOKENIZER).read_text(encoding="utf-8"))
    for number, text in enumerate(MARKS, start=400):
        spec["added_tokens"].append(
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


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
    def make(lengths: Sequence[int], *, seed: int = 0) -> list[Document]:
        """Documents of these lengths with random ids of the small tokenizer."""
        rng = np.random.default_rng(seed)
        return [Document(rng.integers(3, 400, length, dtype=np.int32)) for length in lengths]

    return make


@pytest.fixture(scope="session")
def write_set():
    def write(
        folder: Path,
        documents: Sequence[Document],
        *,
        window_documents: int = 2**20,
        masked: bool = False,
        complete: bool = True,
    ) -> PreparedSet:
        """A prepared set of these documents, from lines 1, 2, ... of a file "made-up"."""
        header = {"fingerprint": "f" * 64, "settings": {}, "files": ["made-up"]}
        writer = SetWriter(
            folder, header=header, labelled=masked, window_documents=window_documents
        )
        origins = [(0, number) for number in range(1, len(documents) + 1)]
        writer.append(Encoded.of(documents, origins), position=None)
        if complete:
            return writer.complete()
        writer.close()
        return PreparedSet.open(folder)

    return write


@pytest.fixture(scope="session")
def make_packs(tmp_path_factory, write_set, hasher):
    def make(
        *sources: Sequence[Document] | PreparedSet,
        weights: Sequence[float] = (),
        epochs: int | None = None,
        streaming: bool = False,
        seed: int = 1,
        pack_length: int = 32,
        alignment: int = 4,
        holdout: float = 0.0,
        held_out: bool = False,
        on_long_document: Literal["split", "drop", "refuse"] = "split",
        hasher: RowHasher | None = hasher,
        vision: VisionConfig | None = None,
        **written,
    ) -> PackedSet:
        """Packs of sources, each given as documents (written as `written` says) or as a set."""
        plan = PlanSettings(pack_length, alignment, on_long_document, holdout, seed, streaming)
        found = []
        for number, source in enumerate(sources):
            if not isinstance(source, PreparedSet):
                source = write_set(tmp_path_factory.mktemp("set"), source, **written)
            weight = weights[number] if weights else 1.0
            plans = StoredPlans(source, plan)
            found.append(PackSource(f"data.s{number}", plans, weight, epochs))
        return PackedSet(tuple(found), pack_length, 2, seed, held_out, hasher, vision)

    return make


@pytest.fixture
def writing(tmp_path):
    """Holds the lock of the set in tmp_path/set, as the process that writes it would."""
    with locked(lock_file(tmp_path / "set"), say=print):
        yield
