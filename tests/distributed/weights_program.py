"""What each rank of test_weights_of_ranks runs: start from weights, gather them, note reads.

Usage: weights_program.py CONFIGS.pickle OUT.pt    (RANK, WORLD_SIZE, MASTER_* set)
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.errors import DataError
from model.names import released_slots
from model.released.files import WeightsFolder
from trainer.config import TrainerConfig
from trainer.learner import build_learner, weights_by_name


def main() -> None:
    configs_file, out = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = [start(config) for config in pickle.loads(configs_file.read_bytes())]
    torch.save(results, out.with_suffix(f".{dist.get_rank()}"))
    dist.destroy_process_group()


def start(config: TrainerConfig) -> dict[str, object]:
    """The whole weights after the start, or its error; how many rows of each tensor were read."""
    read: dict[str, int] = {}
    original = WeightsFolder.read

    def counted(self: WeightsFolder, name: str, low: int = 0, high: int | None = None) -> Tensor:
        tensor = original(self, name, low, high)
        read[name] = read.get(name, 0) + tensor.shape[0]
        return tensor

    WeightsFolder.read = counted
    try:
        learner = build_learner(config)
    except DataError as error:
        return {"error": str(error)}
    finally:
        WeightsFolder.read = original
    model, found = learner.model, {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = tensor.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        found |= dict(released_slots(name, whole.clone()))
    for name, tensor in weights_by_name(model, learner.store).items():
        if name.startswith("tables/"):
            assert isinstance(tensor, DTensor)
            found[name.removeprefix("tables/")] = tensor.full_tensor()
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    return {"read": read, "found": found, "learns": learns}


if __name__ == "__main__":
    main()
