"""Small models over packed documents, for property tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig, QatConfig
from model.engram.hashing import HashGeometry, hash_rows
from model.engram.owners import OwnerStore
from model.init import init_weights
from model.kernels.library import without_kernels
from model.layout import ModelInputs
from model.transformer import DeepseekV41

GOLDEN = Path(__file__).parents[2] / "golden"
BASE = ModelConfig.from_released(json.loads((GOLDEN / "tiny_text" / "config.json").read_text()))
PAD_COMPRESSED = 2


@pytest.fixture(params=["kernels", "torch"])
def each_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """By the kernels, if there is a compiler, and by torch's operators."""
    with without_kernels() if request.param == "torch" else nullcontext():
        yield request.param


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The folder of reference cases."""
    return GOLDEN


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    """make_config(**changes): hidden 64, 6 layers of all roles, ratios 2 and 1, quantisers off."""

    def make(**changes) -> ModelConfig:
        return replace(BASE, **({"qat": QatConfig(False, False, False)} | changes))

    return make


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Packed:
    """Rows of documents; `places[i]` is (row, first column, length) of document i."""

    inputs: ModelInputs
    labels: Tensor
    rows: Tensor
    places: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """Logits [B, S, V], the summed loss and its gradients by name, tables dense."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]

    def of(self, place: tuple[int, int, int]) -> Tensor:
        row, column, length = place
        return self.logits[row, column : column + length]


class Rig:
    """A model whose every weight matters, and its tables.

    `steady`: all Engram gates stand in their clamp. Elsewhere the root's slope near 0 turns a
    rounding of the dot product into a thousandth of the gradient, and hides what a test looks for.
    """

    def __init__(
        self, config: ModelConfig, seed: int = 0, *, steady: bool = False, **options: Any
    ) -> None:
        self.config = config
        self.model = DeepseekV41(config, **options)
        init_weights(self.model, seed=seed, std=0.15)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if tensor.ndim == 1 or name.endswith("_weight"):
                    tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
                if steady and name.endswith("q_weight"):
                    tensor *= 1e-9
        self.store = OwnerStore(replace(config, initializer_range=0.5), seed=seed)

    def pack(self, rows: list[list[list[int]]], *, width: int | None = None) -> Packed:
        """Lay documents of token ids into rows, each at a multiple of the alignment."""
        step, c = self.config.alignment, self.config
        ends = [
            sum(-(-len(d) // step) * step for d in docs[:-1]) + len(docs[-1]) if docs else 1
            for docs in rows
        ]
        width = width or max(ends)
        shape = (len(rows), width)
        ids = torch.full(shape, c.pad_token_id)
        seq, position = torch.zeros(shape).long(), torch.zeros(shape).long()
        labels = torch.full(shape, -100)
        places = []
        for b, docs in enumerate(rows):
            at = 0
            for number, doc in enumerate(docs, start=1):
                n = len(doc)
                ids[b, at : at + n] = torch.tensor(doc)
                seq[b, at : at + n] = number
                position[b, at : at + n] = torch.arange(n)
                labels[b, at : at + n - 1] = torch.tensor(doc[1:], dtype=torch.int64)
                places.append((b, at, n))
                at += -(-n // step) * step
        types = torch.full(shape, -1, dtype=torch.int8)
        inputs = ModelInputs(ids, seq, position, types)
        return Packed(inputs, labels, self.hash(ids, seq), places)

    def hash(self, ids: Tensor, seq: Tensor) -> Tensor:
        if not self.config.engram_layers:
            return torch.zeros(*ids.shape, 0, 0, dtype=torch.int64)
        compressed = ids % self.config.engram_compressed_vocab_size
        geometry = HashGeometry.from_config(self.config)
        rows = hash_rows(geometry, compressed.numpy(), seq_ids=seq.numpy(), pad_id=PAD_COMPRESSED)
        return torch.from_numpy(rows)

    def run(self, *micro_batches: Packed, labels: list[Tensor] | None = None) -> Outcome:
        """Forward and backward; logits are those of the first micro-batch."""
        self.model.zero_grad(set_to_none=True)
        window = self.store.open_window([m.rows for m in micro_batches])
        total = torch.zeros(())
        for i, m in enumerate(micro_batches):
            wanted = m.labels if labels is None else labels[i]
            loss = self.model(m.inputs, engram=window.rows(i), labels=wanted).loss_sum
            loss.backward()
            total += loss.detach()
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in self.model.named_parameters()
            if p.requires_grad
        }
        for n, table, ids, grad in zip(
            self.store.layers, self.store.weight, window.ids, window.grads, strict=True
        ):
            grads[f"table.{n}"] = torch.zeros_like(table).index_copy_(0, ids, grad)
        first = micro_batches[0]
        with torch.no_grad():
            logits = self.model(first.inputs, engram=window.rows(0)).logits
        return Outcome(logits, total, grads)


@pytest.fixture(scope="session")
def make_rig() -> Callable[..., Rig]:
    """make_rig(config, seed=0, steady=False, **the model's own) -> a model and its tables."""
    return Rig


@pytest.fixture(scope="session")
def relative() -> Callable[[Tensor, Tensor], float]:
    """Norm of the difference over the norm of the second; 0 for two zeros."""

    def error(found: Tensor, wanted: Tensor) -> float:
        found, wanted = found.detach().double(), wanted.detach().double()
        difference = (found - wanted).norm()
        return 0.0 if difference == 0 else float(difference / wanted.norm())

    return error
