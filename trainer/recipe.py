"""The published recipe: which rule each parameter learns by, and all rules as one optimiser.

Muon for every matrix the model multiplies by, taken apart where it holds several (experts, heads,
groups, gate and up); AdamW for norms, with weight decay, and for vectors and coefficients, without;
Sinkhorn-balanced momentum for embedding and head.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from model.config import ModelConfig
from trainer.adamw import AdamW
from trainer.config import OptimConfig
from trainer.muon import Muon
from trainer.optim import ParameterOptimizer, adamw_groups, group_of
from trainer.sinkhorn import Sinkhorn

_SINKHORN = re.compile(r"^(embed|head)\.weight$")


class Recipe:
    """AdamW, Muon and Sinkhorn groups behind the face that AdamW alone has."""

    def __init__(self, model: nn.Module, optim: OptimConfig, config: ModelConfig) -> None:
        by_rule: dict[str, list[tuple[str, nn.Parameter]]] = {
            "adamw": [],
            "muon": [],
            "sinkhorn": [],
        }
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                by_rule[rule_of(name, parameter)].append((name, parameter))
        betas = (optim.beta1, optim.beta2)
        groups = adamw_groups(by_rule["adamw"], weight_decay=optim.weight_decay)
        blocks = [row_blocks(name, parameter, config) for name, parameter in by_rule["muon"]]
        self._rules: list[ParameterOptimizer] = [
            AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps),
            Muon(by_rule["muon"], blocks, lr=optim.lr),
            Sinkhorn(by_rule["sinkhorn"], lr=optim.lr),
        ]
        self.param_groups = [group for rule in self._rules for group in rule.param_groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for rule in self._rules:
            self.state.update(rule.state)

    def step(self) -> None:
        """Update every parameter that has a gradient, in place."""
        for rule in self._rules:
            rule.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for rule in self._rules:
            rule.zero_grad()


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
