"""The published recipe: which rule each parameter learns by, and all rules as one optimiser.

Muon for every matrix the model multiplies by, taken apart where it holds several (experts, heads,
groups, gate and up); AdamW for norms, with weight decay, and for vectors and coefficients, without;
Sinkhorn-balanced momentum for embedding and head.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from trainer.adamw import AdamW
from trainer.config import OptimConfig
from trainer.muon import WEIGHT_DECAY, muon_step
from trainer.optim import adamw_groups, group_of
from trainer.sinkhorn import sinkhorn_step

_SINKHORN = re.compile(r"^(embed|head)\.weight$")


class Recipe:
    """AdamW, Muon and Sinkhorn groups behind the face that AdamW alone has."""

    def __init__(self, model: nn.Module, optim: OptimConfig, config: ModelConfig) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        by_rule: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            by_rule.setdefault(rule_of(name, parameter), []).append((name, parameter))
        betas = (optim.beta1, optim.beta2)
        groups = adamw_groups(by_rule["adamw"], weight_decay=optim.weight_decay)
        self._adamw = AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps)
        self._muon = _group("muon", by_rule["muon"], lr=optim.lr)
        self._blocks = [row_blocks(name, p, config) for name, p in by_rule["muon"]]
        self._sinkhorn = _group("sinkhorn", by_rule["sinkhorn"], lr=optim.lr)
        self.param_groups = [*self._adamw.param_groups, self._muon, self._sinkhorn]
        self.state: dict[Tensor, dict[str, Tensor]] = dict(self._adamw.state)
        for group in (self._muon, self._sinkhorn):
            for parameter in group["params"]:
                momentum = torch.zeros_like(parameter, dtype=torch.float32)
                self.state[parameter] = {"momentum": momentum}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, in place."""
        self._adamw.step()
        lr = self._muon["lr"]
        for parameter, blocks in zip(self._muon["params"], self._blocks, strict=True):
            if parameter.grad is not None:
                momentum = self.state[parameter]["momentum"]
                muon_step(
                    parameter,
                    momentum,
                    parameter.grad,
                    lr=lr,
                    weight_decay=WEIGHT_DECAY,
                    blocks=blocks,
                )
        for parameter in self._sinkhorn["params"]:
            if parameter.grad is not None:
                momentum = self.state[parameter]["momentum"]
                sinkhorn_step(parameter, momentum, parameter.grad, lr=self._sinkhorn["lr"])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def rule_of(name: str, parameter: Tensor) -> str:
    """adamw, muon or sinkhorn. ValueError for a vector that no rule names."""
    if _SINKHORN.search(name):
        return "sinkhorn"
    matrix = parameter.dim() >= 2 and group_of(name, parameter) == "decay"
    return "muon" if matrix else "adamw"


def row_blocks(name: str, parameter: Tensor, config: ModelConfig) -> tuple[int, ...]:
    """How the rows of a matrix (the last but one dimension) divide into matrices of their own."""
    rows = parameter.shape[-2]
    if name.endswith(".indexer.wq_b.weight"):
        return (config.index_head_dim,) * config.index_n_heads
    if name.endswith(".attn.wq_b.weight"):
        return (config.head_dim,) * config.num_attention_heads
    if name.endswith(".attn.wo_a.weight"):
        return (config.o_lora_rank,) * config.o_groups
    if re.search(r"experts\.w13(\.weight)?$", name):
        return (rows // 2,) * 2
    if name.endswith(".attn.wqkv.weight"):
        heads, width = config.vision.num_attention_heads, config.vision.hidden_size
        return (*(width // heads,) * (2 * heads), width)
    return (rows,)


def _group(rule: str, named: list[tuple[str, nn.Parameter]], *, lr: float) -> dict[str, Any]:
    return {
        "name": rule,
        "params": [parameter for _, parameter in named],
        "param_names": [name for name, _ in named],
        "lr": lr,
    }
