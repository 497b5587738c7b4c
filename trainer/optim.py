"""AdamW over the model's parameters: which group each one is in, and its state by name.

Groups. With weight decay: matrices and norms. Without: embedding, head, image delimiters, biases,
attention sinks, the base and scale of the hyper-connections, Engram's query and key weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from model.config import ModelConfig
from trainer.adamw import AdamW
from trainer.config import OptimConfig

Group = Literal["decay", "no_decay"]


class ParameterOptimizer(Protocol):
    """What a step and a checkpoint need of an optimiser: groups with "params", "param_names" and
    "lr", state tensors by parameter, and the update."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


_NO_DECAY = re.compile(
    r"(^|\.)(embed\.weight|head\.weight|image_(start|newline|end)|attn_sink|bias|bias_vl"
    r"|hc_(attn|ffn)[._](base|scale)|engram[._](q|k)_weight)$"
)
_NORM = re.compile(r"(^|[._])norm\d*\.weight$")


def group_of(name: str, parameter: Tensor) -> Group:
    """The group of a parameter, by its released name and its number of dimensions.

    Raises ValueError for a vector that no rule names: deciding whether a new kind of parameter
    decays is for whoever adds it.
    """
    if _NO_DECAY.search(name):
        return "no_decay"
    if _NORM.search(name) or parameter.dim() >= 2:
        return "decay"
    raise ValueError(
        f"no weight-decay rule covers parameter {name} {tuple(parameter.shape)}; "
        "add its name to the groups in trainer/optim.py"
    )


def build_optimizer(
    model: nn.Module, optim: OptimConfig, config: ModelConfig
) -> ParameterOptimizer:
    """The optimiser that `optim.name` names over every parameter that takes a gradient, its state
    allocated at once."""
    if optim.name == "pretrain":
        from trainer.recipe import Recipe

        return Recipe(model, optim, config)
    return build_adamw(model, optim)


def build_adamw(model: nn.Module, optim: OptimConfig) -> AdamW:
    """AdamW over every parameter of `model` that takes a gradient, its state allocated at once."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = adamw_groups(named, weight_decay=optim.weight_decay)
    return AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)


def adamw_groups(
    named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups of "params" with "param_names" in their order, a "name" (decay or no_decay) and a
    "weight_decay"."""
    members: dict[Group, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        members.setdefault(group_of(name, parameter), []).append((name, parameter))
    decay: dict[Group, float] = {"decay": weight_decay, "no_decay": 0.0}
    return [
        {
            "params": [parameter for _, parameter in own],
            "param_names": [name for name, _ in own],
            "name": group,
            "weight_decay": decay[group],
        }
        for group, own in members.items()
    ]


def named_parameters(optimizer: ParameterOptimizer) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) over all groups of an optimiser built by `build_adamw`."""
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def optimizer_tensors(optimizer: ParameterOptimizer) -> dict[str, Tensor]:
    """The live state tensors as "parameter name/state name"; writing into them restores it."""
    return {
        f"{name}/{key}": value
        for name, parameter in named_parameters(optimizer)
        for key, value in optimizer.state[parameter].items()
    }


def set_learning_rate(optimizer: ParameterOptimizer, lr: float) -> None:
    """Use `lr` for the next step of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
