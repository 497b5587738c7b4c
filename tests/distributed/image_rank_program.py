"""What each rank of test_images_two_ranks runs: the gradient of its rows, written to a file.

Usage: image_rank_program.py CASE OUT.pt    (RANK, WORLD_SIZE, MASTER_* set)
Of the case's two rows and one of text alone, rank r takes the rows r, r + world, ...; with two
ranks the second has no image.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from model.config import ModelConfig
from model.init import init_weights
from model.layout import Images, ModelInputs
from model.parallel.mesh import build_mesh
from model.transformer import DeepseekV41
from trainer.ranks import Ranks, is_sharded
from trainer.sharding import reduce_islands, shard_model


def main() -> None:
    case, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    ranks = Ranks.from_process_group()
    document = json.loads((case / "config.json").read_text())
    document["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    # Two ranks run every block again in backward, one rank none: that changes nothing either.
    recompute = "none" if world == 1 else "full"
    model = DeepseekV41(ModelConfig.from_released(document), recompute=recompute)
    init_weights(model, seed=1, std=0.1)
    if world > 1:
        shard_model(model, build_mesh(dp_shard=world), dtype=torch.float32)
    for inputs, labels in list(rows(load_file(case / "inputs.safetensors")))[ranks.rank :: world]:
        with torch.no_grad():  # an evaluation has the same collectives, fewer of them
            model(inputs, engram=[], labels=labels)
        model(inputs, engram=[], labels=labels).loss_sum.backward()
    reduce_islands(model, ranks)
    found = {
        name: (p.grad.full_tensor() if is_sharded(p.grad) else p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    if ranks.first:
        torch.save(found, out)
    if world > 1:
        dist.destroy_process_group()


def rows(case: dict[str, Tensor]):
    """(inputs, labels) of: two images, text alone, one image, text alone."""
    ids, types, patches = case["input_ids"], case["vision_token_types"], case["pixel_values"]
    grids = case["image_grid_hws"]  # of one image in the first row and two in the second
    first = int(grids[0].prod())
    images = [
        Images(patches[first:].flatten(1), grids[1:]),
        None,
        Images(patches[:first].flatten(1), grids[:1]),
        None,
    ]
    for row, seen in zip([1, 0, 0, 1], images, strict=True):
        shown = types[row : row + 1] if seen else torch.full_like(types[row : row + 1], -1)
        one = ids[row : row + 1]
        labels = torch.cat([one[:, 1:], torch.tensor([[-100]])], dim=1)
        after = torch.cat([shown[:, 1:], torch.tensor([[-1]])], dim=1)
        inputs = ModelInputs(
            input_ids=one,
            seq_ids=torch.ones_like(one),
            position_ids=torch.arange(one.shape[1])[None],
            token_types=shown,
            images=seen,
        )
        yield inputs, labels.masked_fill(after >= 0, -100)


if __name__ == "__main__":
    main()
