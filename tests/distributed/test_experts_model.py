"""The whole model with its experts divided over ranks learns what one rank learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model.block import Block
from model.config import ModelConfig, QatConfig, Recompute
from model.engram.rows import EngramRows
from model.init import init_weights
from model.layout import ModelInputs
from model.parallel.mesh import Mesh, build_mesh
from model.transformer import DeepseekV41
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

GOLDEN = Path(__file__).parents[1] / "golden"
COLUMNS, TABLE_ROWS = 24, 40
# By rank and micro-batch: the lengths of the documents in the row. Rank 1 ends on padding alone.
DOCUMENTS = [[[11, 8], [20]], [[3, 5, 9], []]]


def small() -> ModelConfig:
    document = json.loads((GOLDEN / "tiny_text/config.json").read_text())
    base = ModelConfig.from_released(document)
    return dataclasses.replace(base, qat=QatConfig(False, False, False))


def micro_batch(
    config: ModelConfig, rank: int, number: int
) -> tuple[ModelInputs, Tensor, list[EngramRows]]:
    """A row of documents that start at even columns, its labels, and rows for each Engram layer."""
    draw = torch.Generator().manual_seed(10 * rank + number)
    ids = torch.randint(8, config.vocab_size, (1, COLUMNS), generator=draw)
    seq, position = torch.zeros(2, 1, COLUMNS, dtype=torch.int64)
    labels, at = torch.full((1, COLUMNS), -100), 0
    for document, length in enumerate(DOCUMENTS[rank][number], start=1):
        seq[0, at : at + length] = document
        position[0, at : at + length] = torch.arange(length)
        labels[0, at : at + length - 1] = ids[0, at + 1 : at + length]
        at += length + length % 2
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    rows = []
    for _ in config.engram_layers:
        table = torch.Generator().manual_seed(7)
        values = torch.randn(TABLE_ROWS, config.engram_head_dim, generator=table)
        inverse = torch.randint(TABLE_ROWS, (1, COLUMNS, columns), generator=draw)
        rows.append(EngramRows(values, inverse, torch.zeros_like(values)))
    types = torch.full_like(ids, -1, dtype=torch.int8)
    return ModelInputs(ids, seq, position, types), labels, rows


def build(recompute: Recompute, mesh: Mesh, workspace: int) -> DeepseekV41:
    model = DeepseekV41(small(), distill=True, recompute=recompute, mesh=mesh)
    init_weights(model, seed=0, std=0.1)
    for layer in model.layers:
        assert isinstance(layer, Block)
        experts = layer.ffn.experts
        experts.workspace_bytes = workspace
        for name, whole in list(experts.named_parameters()):
            mine = whole.data.chunk(mesh.ep.size)[mesh.ep.rank].clone()
            experts.register_parameter(name, nn.Parameter(mine))
    return model


def learn(model: DeepseekV41, ranks: range) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every micro-batch's losses and expert counts, and all gradients summed over them."""
    losses, tables = [], torch.zeros(())
    for rank in ranks:
        for number in range(2):
            inputs, labels, rows = micro_batch(model.config, rank, number)
            out = model(inputs, engram=rows, labels=labels, balance=True)
            assert out.loss_sum is not None
            assert out.balance_loss is not None
            assert out.index_loss is not None
            (out.loss_sum + 0.1 * out.balance_loss + out.index_loss).backward()
            losses += [out.loss_sum.detach(), out.balance_loss.detach(), out.index_loss.detach()]
            losses.append(out.expert_counts)
            assert all(r.grad_buffer is not None for r in rows)
            tables = tables + torch.stack(
                [r.grad_buffer for r in rows if r.grad_buffer is not None]
            )
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, grads | {"tables": tables}


def divided(recompute: Recompute, workspace: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's losses; gradients summed over the ranks, experts together again."""
    mesh = build_mesh(dp_shard=2, ep=2)
    rank = mesh.world.rank
    losses, grads = learn(build(recompute, mesh, workspace), range(rank, rank + 1))
    for name, grad in sorted(grads.items()):
        if "ffn.experts" in name:
            grads[name] = mesh.ep.all_gather(grad).flatten(0, 1)
        else:
            mesh.world.all_reduce_sum(grad)
    return losses, grads


@pytest.mark.parametrize(
    ("recompute", "workspace"),
    [("none", 1 << 25), ("selective", 20_000), ("full", 20_000)],
)
def test_losses_and_gradients_of_one_rank(
    ranks: Ranks, recompute: Recompute, workspace: int
) -> None:
    losses, wanted = learn(build(recompute, Mesh(), workspace), range(2))
    found = ranks.run(2, divided, recompute, workspace)
    for one, other in zip(losses, [*found[0][0], *found[1][0]], strict=True):
        assert torch.equal(one, other)
    for _, grads in found:
        assert grads.keys() == wanted.keys()
        for name, grad in grads.items():
            exact = wanted[name].double()
            assert (grad.double() - exact).norm() <= 1e-6 * exact.norm(), name
    assert all(g.any() for n, g in wanted.items() if "experts" in n)
