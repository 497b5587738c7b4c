"""Weights streamed into a model: every value, every share of it, every fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.names import released_slots, table_name
from model.released.audit import audit, unread_by
from model.released.decode import SLICE_VALUES, slices
from model.released.errors import WeightsError
from model.released.files import open_folder
from model.released.load import Target, load, targets_of, wanted_shapes
from model.transformer import DeepseekV41


def silent(done: int, total: int) -> None:
    pass


def empty(config: ModelConfig) -> list[Target]:
    """Targets of a fresh model and its tables, every value NaN."""
    tables = [
        Target.whole(table_name(n), torch.empty(rows, config.engram_head_dim))
        for n, rows in zip(config.engram_layers, config.engram_num_embeddings, strict=False)
    ]
    targets = [*targets_of(DeepseekV41(config)), *tables]
    for target in targets:
        target.tensor.fill_(torch.nan)
    return targets


def faults(path: Path, config: ModelConfig) -> list[str]:
    wanted = wanted_shapes(empty(config))
    return audit(open_folder(path), wanted, unread=unread_by(config, tables=True))


def filled(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    targets = empty(config)
    load(open_folder(path), targets, progress=silent)
    return {n: t for target in targets for n, t in released_slots(target.name, target.tensor)}


def test_every_value_arrives_decoded(pristine) -> None:
    assert faults(pristine.path, pristine.config) == []
    found = filled(pristine.path, pristine.config)
    assert found.keys() == pristine.decoded.keys()
    for name, expected in pristine.decoded.items():
        assert torch.equal(found[name], expected), name


def test_bfloat16_targets_get_the_exact_product_rounded_once(pristine) -> None:
    folder = open_folder(pristine.path)
    for name in ("layers.2.ffn.experts.3.w1.weight", "layers.1.engram.wkv.weight"):
        target = Target.whole(name, torch.empty(pristine.decoded[name].shape).bfloat16())
        load(folder, [target], progress=silent)
        assert torch.equal(target.tensor, pristine.decoded[name].bfloat16())


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_shares_of_ranks_make_up_the_whole(pristine, ranks: int) -> None:
    """Cut on dim 0, experts on dim 1, as FSDP2 does: ceil(n / ranks) each, the last shorter."""
    folder = open_folder(pristine.path)
    for whole in empty(pristine.config):
        dim = 1 if whole.tensor.ndim == 3 else 0
        parts = whole.tensor.chunk(ranks, dim)
        size = parts[0].shape[dim]
        for number, part in enumerate(parts):
            offset = [0] * part.ndim
            offset[dim] = number * size
            share = Target(whole.name, part.contiguous(), whole.shape, tuple(offset))
            load(folder, [share], progress=silent)
            part.copy_(share.tensor)
        for name, found in released_slots(whole.name, whole.tensor):
            assert torch.equal(found, pristine.decoded[name]), name


def test_shares_of_expert_parallel_ranks(pristine) -> None:
    name, shape = "layers.3.ffn.experts.w13", (8, 64, 64)
    share = Target(name, torch.empty(3, 20, 64), shape, (5, 24, 0))
    load(open_folder(pristine.path), [share], progress=silent)
    for e in (5, 6, 7):
        gate = pristine.decoded[f"layers.3.ffn.experts.{e}.w1.weight"]
        up = pristine.decoded[f"layers.3.ffn.experts.{e}.w3.weight"]
        assert torch.equal(share.tensor[e - 5], torch.cat([gate, up])[24:44])


def test_a_share_reads_only_its_own_rows(pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(pristine.path)
    read: list[tuple[str, int, int]] = []
    original = type(folder).read

    def watched(self, name: str, low: int = 0, high: int | None = None) -> Tensor:
        assert high is not None
        read.append((name, low, high))
        return original(self, name, low, high)

    monkeypatch.setattr(type(folder), "read", watched)
    experts = "layers.2.ffn.experts"
    load(
        folder,
        [
            Target("layers.0.attn.wq_b.weight", torch.empty(40, 32), (256, 32), (40, 0)),
            Target(f"{experts}.w2", torch.empty(1, 5, 32), (8, 64, 32), (2, 10, 0)),
        ],
        progress=silent,
    )
    assert read == [
        ("layers.0.attn.wq_b.weight", 32, 96),
        ("layers.0.attn.wq_b.scale", 1, 3),
        (f"{experts}.2.w2.weight", 10, 15),
        (f"{experts}.2.w2.scale", 10, 15),
    ]


def test_a_shorter_model_takes_the_first_layers(pristine) -> None:
    short = replace(pristine.config, num_hidden_layers=5)
    assert faults(pristine.path, short) == []
    found = filled(pristine.path, short)
    assert torch.equal(
        found["layers.4.attn_norm.weight"], pristine.decoded["layers.4.attn_norm.weight"]
    )
    assert not any(name.startswith("layers.5.") for name in found)


def test_every_fault_is_named_at_once(small) -> None:
    expert = "layers.2.ffn.experts"
    small.change("norm.weight", lambda t: None)
    small.change("layers.0.attn.wkv.scale", lambda t: None)
    small.change("layers.1.attn.wkv.weight", lambda t: None)
    small.change("layers.0.attn.wq_a.scale", lambda t: t[:, :1])
    small.change("layers.0.attn.wo_b.scale", lambda t: t.float())
    small.change(f"{expert}.0.w1.weight", lambda t: t[:, :16])
    small.change(f"{expert}.0.w2.weight", lambda t: t[:8])
    small.change(f"{expert}.0.w3.weight", lambda t: torch.zeros(32, 64))
    small.change("head.weight", lambda t: t[:5])
    small.change("embed.weight", lambda t: t.view(torch.int16))
    small.change("layers.3.attn_norm.weight", lambda t: t.float().to(torch.float8_e4m3fn))
    small.add("layers.5.attn.wq_c.weight", torch.zeros(2))
    small.add("layers.6.attn.wq_a.weight", torch.zeros(2))
    small.add("aligner.w1.weight", torch.zeros(2))
    assert faults(small.path, small.config) == [
        "embed.weight has dtype I16, which is none of a weight's",
        "head.weight has shape [5, 64], not [448, 64]",
        "layers.0.attn.wkv.weight is FP8 with a scale per 32 x 32 block, but "
        "layers.0.attn.wkv.scale is missing",
        "layers.0.attn.wo_b.scale has dtype F32, not F8_E8M0",
        "layers.0.attn.wq_a.scale has shape [1, 1], not [1, 2]",
        "layers.1.attn.wkv.scale is there, but layers.1.attn.wkv.weight is missing",
        f"{expert}.0.w1.weight decodes from FP4 to [32, 32], not [32, 64]. "
        "Half of the packed values are lost.",
        f"{expert}.0.w2.weight decodes from FP4 to [8, 32], not [64, 32].",
        f"{expert}.0.w3.scale is there, but {expert}.0.w3.weight is F32, which has no scale",
        "layers.3.attn_norm.weight of shape [64] is stored as FP8 with a scale per 32 x 32 block; "
        "only matrices are",
        "norm.weight is missing",
        "layers.5.attn.wq_c.weight belongs to no part of this model",
    ]


def test_a_lost_shard_is_named_once(small) -> None:
    lost = len(open_folder(small.path).tensors)
    small.shard(2).unlink()
    kept = len(open_folder(small.path).tensors)
    assert faults(small.path, small.config) == [
        f"{small.shard(2).name} is missing ({lost - kept:,} tensors)"
    ]


def test_values_that_are_no_numbers_are_named_by_tensor_and_file(small) -> None:
    def spoil(tensor: Tensor) -> Tensor:
        tensor[1, 2] = torch.nan
        return tensor

    def spoil_scale(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8)[0, 0] = 255
        return tensor

    def spoil_code(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8)[3, 3] = 0x7F
        return tensor

    scale, code = "layers.2.ffn.experts.4.w3.scale", "layers.1.engram.embed.weight"
    for name, edit in (("head.weight", spoil), (scale, spoil_scale), (code, spoil_code)):
        small.change(name, edit)
    assert faults(small.path, small.config) == []
    with pytest.raises(WeightsError) as caught:
        filled(small.path, small.config)
    holds = "holds {} values that are NaN or infinite"
    assert sorted(caught.value.problems) == sorted(
        [
            f"head.weight in {small.holder('head.weight').name} {holds.format(1)}",
            f"layers.2.ffn.experts.4.w3.weight in {small.holder(scale[:-5] + 'weight').name} "
            + holds.format(32),
            f"{code} in {small.holder(code).name} {holds.format(1)}",
        ]
    )


def test_a_long_list_is_shortened_in_the_message_alone(tmp_path: Path) -> None:
    error = WeightsError(tmp_path, [f"fault {n}" for n in range(1234)])
    assert len(error.problems) == 1234
    assert str(error).splitlines()[0] == f"The weights in {tmp_path} cannot be used:"
    assert str(error).splitlines()[-1] == "  ... and 1,194 more"
    assert len(str(error).splitlines()) == 42


def test_slices_cover_everything_and_cut_no_block() -> None:
    assert list(slices(0, 3, columns=1)) == [(0, 3)]
    found = list(slices(70, 1000, columns=SLICE_VALUES // 100))
    assert found == [(70, 96), *((n, n + 96) for n in range(96, 960, 96)), (960, 1000)]
    assert list(slices(5, 70, columns=SLICE_VALUES)) == [(5, 32), (32, 64), (64, 70)]
