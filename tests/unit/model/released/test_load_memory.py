"""Peak memory of loading, measured in a process of its own: the model and one slice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.config import ModelConfig
from model.released.check import model_shapes
from model.released.decode import SLICE_VALUES
from model.released.files import DTYPES
from model.released.layout import released_form, stored_tensors

GOLDEN = Path(__file__).parents[3] / "golden"
SLICE_BYTES = 10 * SLICE_VALUES  # as decode.py says
ALLOWANCE = 4 << 20  # libraries that wake up, headers of files

# Each tensor in a mapping of its own, so that what is held is what is measured: glibc would move
# its own threshold up to the first large tensor it frees, and keep holes of 8 MB by chance.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "131072"}

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from model.config import ModelConfig
from model.released.files import open_folder
from model.released.load import load, targets_of
from model.transformer import DeepseekV41

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

folder = open_folder(Path(sys.argv[1]))
config = ModelConfig.from_released(folder.json("config.json"))
with torch.device("meta"):
    model = DeepseekV41(config)
targets = targets_of(model.to_empty(device="cpu"))
load(folder, targets[-2:], progress=lambda done, total: None)  # libraries wake up
before = memory("VmRSS")
load(folder, targets, progress=lambda done, total: None)
size = sum(t.tensor.nbytes for t in targets)
print(json.dumps({"model": size, "extra": memory("VmHWM") - before - size}))
"""


def write_random(path: Path, config: ModelConfig) -> None:
    """Random bytes under every released name: codes of small magnitude, middling scales."""
    draw = torch.Generator().manual_seed(0)
    stored = {}
    for name, shape in model_shapes(config, tables=False).items():
        for part, (dtype, size) in stored_tensors(name, shape, released_form(name)).items():
            if dtype in ("F32", "BF16"):
                stored[part] = torch.zeros(size, dtype=DTYPES[dtype])
            else:
                code = torch.randint(100, 120, size, generator=draw, dtype=torch.uint8)
                stored[part] = code.view(DTYPES[dtype])
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config.to_released()))


def test_loading_takes_the_model_and_one_slice(tmp_path: Path) -> None:
    document = json.loads((GOLDEN / "tiny_text" / "config.json").read_text())
    config = replace(
        ModelConfig.from_released(document),
        hidden_size=1024,
        num_hidden_layers=3,
        n_routed_experts=2,
        moe_intermediate_size=2304,  # an expert's matrix is more than one slice
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    write_random(tmp_path, config)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=os.environ | EXACT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] > 5 * SLICE_BYTES
    assert found["extra"] <= SLICE_BYTES + ALLOWANCE, found
