"""For all tests: prepared data goes to a cache of the test run, which its processes share; and
checkpoints in the released layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import ModelConfig
from model.quantization.released import (
    decode_fp4,
    decode_fp8_blocks,
    decode_fp8_rows,
    encode_fp8_blocks,
    encode_fp8_rows,
)
from tests.ranks import Ranks

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # equal to the last bit, on any machine

GOLDEN = Path(__file__).parent / "golden"
E8M0 = torch.float8_e8m0fnu
DENSE = ("wq_a", "wq_b", "wo_a", "wo_b")
SHARDS = 3


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that stands for the user's cache folder."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        plots = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
        if "MPLCONFIGDIR" not in os.environ:  # its list of fonts takes seconds to make
            patch.setenv("MPLCONFIGDIR", str(plots))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@dataclass
class Small:
    """`path`: the folder. `decoded`: what each weight stands for. `draft`: the mtp tensors."""

    path: Path
    config: ModelConfig
    decoded: dict[str, Tensor]
    draft: dict[str, Tensor]

    def shard(self, number: int) -> Path:
        return self.path / f"model-{number:05d}-of-{SHARDS:05d}.safetensors"

    def holder(self, name: str) -> Path:
        index = json.loads((self.path / "model.safetensors.index.json").read_text())
        return self.path / index["weight_map"][name]

    def change(self, name: str, edit: Callable[[Tensor], Tensor | None]) -> None:
        """Replace a tensor in its shard, or take it out there and in the index (None)."""
        file = self.holder(name)
        tensors = load_file(file)
        made = edit(tensors.pop(name))
        if made is not None:
            tensors[name] = made.contiguous()
        save_file(tensors, file)
        if made is None:
            self.reindex(lambda weight_map: weight_map.pop(name))

    def add(self, name: str, tensor: Tensor) -> None:
        """One more tensor in the first shard and in the index."""
        tensors = load_file(self.shard(1))
        save_file(tensors | {name: tensor}, self.shard(1))
        self.reindex(lambda weight_map: weight_map.update({name: self.shard(1).name}))

    def reindex(self, edit: Callable[[dict[str, str]], object]) -> None:
        file = self.path / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        edit(index["weight_map"])
        file.write_text(json.dumps(index))


def encoded(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a weight by the format's own description, and what they stand for.

    As another quantiser may have left them: scales larger than need be, negative zeros.
    """
    last = name.split(".")[-2]
    scale_name = name.removesuffix("weight") + "scale"
    if ".experts." in name:
        rows, columns = weight.shape
        draw = torch.Generator().manual_seed(len(name) + rows)
        codes = torch.randint(0, 256, (rows, columns // 2), generator=draw).to(torch.uint8)
        exponents = torch.randint(118, 122, (rows, -(-columns // 32)), generator=draw)
        packed, scale = codes.view(torch.int8), exponents.to(torch.uint8).view(E8M0)
        return {name: packed, scale_name: scale}, decode_fp4(packed, scale)
    if "engram.embed" in name:
        encode, decode = encode_fp8_rows, decode_fp8_rows
    elif (
        (".attn." in name and last in DENSE)
        or name.endswith((".attn.wkv.weight", "engram.wkv.weight"))
        or "shared_experts" in name
    ):
        encode, decode = encode_fp8_blocks, decode_fp8_blocks
    else:
        fp32 = ".hc_" in name or name.endswith(("attn_sink", "gate.bias", "gate.bias_vl"))
        stored = weight if fp32 else weight.bfloat16()
        return {name: stored}, stored.float()
    _, scale = encode(weight)
    larger = (scale.view(torch.uint8) + 1).view(E8M0)
    tall = 32 if encode is encode_fp8_blocks else 1
    per_row = larger.float().repeat_interleave(tall, 0)[: weight.shape[0]]
    per_value = per_row.repeat_interleave(32, 1)[:, : weight.shape[1]]
    codes = (weight / per_value).to(torch.float8_e4m3fn)
    return {name: codes, scale_name: larger}, decode(codes, larger)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The reference model's weights in the released layout: three shards, quantised, with draft
    tensors. Do not change it."""
    path = tmp_path_factory.mktemp("released")
    document = json.loads((GOLDEN / "tiny_text" / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    document["text_config"]["num_nextn_predict_layers"] = 1
    document["text_config"]["compress_ratios"].append(0)
    (path / "config.json").write_text(json.dumps(document, indent=2))
    shutil.copy(GOLDEN / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text('{"model_max_length": 1048576}\n')
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, weight in sorted(load_file(GOLDEN / "tiny_text" / "model.safetensors").items()):
        made, decoded[name] = encoded(name, weight)
        stored |= made
    draft = {
        "mtp.0.attn.wkv.weight": torch.arange(96).to(torch.uint8).view(3, 32),
        "mtp.0.attn.wkv.scale": torch.tensor([[130]], dtype=torch.uint8),
        "mtp.0.norm.weight": torch.linspace(0, 1, 64).bfloat16(),
    }
    draft["mtp.0.attn.wkv.weight"] = draft["mtp.0.attn.wkv.weight"].view(torch.float8_e4m3fn)
    draft["mtp.0.attn.wkv.scale"] = draft["mtp.0.attn.wkv.scale"].view(E8M0)
    stored |= draft
    small = Small(path, ModelConfig.from_released(document), decoded, draft)
    names, weight_map = list(stored), {}
    for number in range(1, SHARDS + 1):
        mine = names[number - 1 :: SHARDS]
        save_file({n: stored[n] for n in mine}, small.shard(number), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, small.shard(number).name)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in stored.values())},
        "weight_map": weight_map,
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return small


@pytest.fixture
def small(pristine: Small, tmp_path: Path) -> Small:
    """A copy to spoil."""
    path = tmp_path / "weights"
    shutil.copytree(pristine.path, path)
    return Small(path, pristine.config, pristine.decoded, pristine.draft)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of ranks, see tests/ranks.py."""
    pool = Ranks()
    yield pool
    pool.close()
