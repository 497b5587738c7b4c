"""The model kind: the reference cases pass, and every gate fails for what it is there to catch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

Verify = Callable[..., tuple[int, list[str]]]
Spoilt = Callable[..., Path]
CASES = ("tiny_text", "tiny_text_noqat", "tiny_packed")


@pytest.fixture
def edited(golden: Path, tmp_path: Path) -> Callable[..., Path]:
    """edited(case, file, **entries): a copy of a case with other entries in a JSON file."""

    def make(case: str, file: str, **entries: object) -> Path:
        folder = tmp_path / case
        if not folder.exists():
            shutil.copytree(golden / case, folder)
        document = json.loads((folder / file).read_text())
        section = document["text_config"] if file == "config.json" else document
        section.update(entries)
        (folder / file).write_text(json.dumps(document))
        return folder

    return make


def scale(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(outputs: dict[str, Tensor]) -> None:
        outputs[name] *= factor

    return change


def failures(line: str) -> str:
    return line.partition("| failed: ")[2]


@pytest.mark.parametrize("case", CASES)
def test_reference_case_passes(verify_json: Callable[..., dict], golden: Path, case: str) -> None:
    found = verify_json(golden / case)
    (report,) = found["cases"]
    assert found["exit_code"] == 0, report["failed"]
    groups = {c["group"] for c in report["checks"]}
    expected = {"logits", "layers", "gradients", "zero gradients", "loss", "rows", "selections"}
    assert groups == expected | ({"all gradients"} if case == "tiny_text_noqat" else set())
    counted = {g: sum(c["group"] == g for c in report["checks"]) for g in groups}
    # 6 layers' streams and pre-mix, 2 Engram layers; 3 selections and a candidate pool.
    assert (counted["layers"], counted["rows"], counted["selections"]) == (14, 2, 4)
    assert counted["gradients"] + counted["zero gradients"] > 200


def test_the_line_names_the_worst_gradient(verify: Verify, golden: Path) -> None:
    code, (line,) = verify(golden / "tiny_text_noqat")
    assert code == 0
    for part in ("logits ", "gradients ", "(layers.", "rows 888/888", "selections 3864/3864"):
        assert part in line


@pytest.mark.parametrize("case", CASES)
def test_one_changed_weight_fails(verify: Verify, spoilt: Spoilt, case: str) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights["layers.2.attn.wkv.weight"][3, 5] += 0.05

    code, (line,) = verify(spoilt(case, "model.safetensors", change))
    assert code == 1
    assert "FAIL" in line
    assert failures(line).startswith("logits logits:")


def test_weights_that_are_not_finite_fail(verify: Verify, spoilt: Spoilt) -> None:
    change = scale("layers.2.attn.wq_a.weight", torch.nan)
    code, lines = verify(spoilt("tiny_text", "model.safetensors", change))
    assert code == 65
    assert "layers.2.attn.wq_a.weight in model.safetensors holds 2,048 values" in lines[-1]


def test_logits_that_are_not_finite_fail(verify: Verify, spoilt: Spoilt) -> None:
    change = scale("norm.weight", 2e38)
    code, (line,) = verify(spoilt("tiny_text", "model.safetensors", change))
    assert code == 1
    assert "logits nan" in line


@pytest.mark.parametrize("case", CASES)
def test_one_changed_row_id_fails(verify: Verify, spoilt: Spoilt, case: str) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        outputs["engram_rows.3"][1, 20, 4] += 1

    code, (line,) = verify(spoilt(case, "outputs.safetensors", change))
    assert code == 1
    assert failures(line).startswith("rows engram_rows.3: 1 of")
    assert "more" not in line


@pytest.mark.parametrize("case", CASES)
def test_one_flipped_gradient_fails(verify: Verify, spoilt: Spoilt, case: str) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        outputs["grad.layers.4.attn.attn_sink"] *= -1

    code, (line,) = verify(spoilt(case, "outputs.safetensors", change))
    assert code == 1
    assert failures(line).startswith("gradients layers.4.attn.attn_sink: 2.0e+00, at most")


@pytest.mark.parametrize(
    ("case", "name", "size", "passes"),
    [
        ("tiny_text_noqat", "logits", 1e-5, True),
        ("tiny_text_noqat", "logits", 4e-5, False),
        ("tiny_text_noqat", "streams.0", 4e-5, False),
        ("tiny_text_noqat", "pre_mix.5", 4e-5, False),
        ("tiny_text_noqat", "engram_out.1", 4e-5, False),
        ("tiny_text_noqat", "loss", 4e-6, False),
        ("tiny_text_noqat", "grad.norm.weight", 4e-5, False),
        ("tiny_text_noqat", "grad.layers.1.engram.k_weight", 4e-5, True),
        ("tiny_text_noqat", "grad.layers.1.engram.k_weight", 3e-4, False),
        ("tiny_text_noqat", "grad.layers.1.engram.wkv.weight", 4e-5, False),
        ("tiny_text", "logits", 6e-5, True),
        ("tiny_text", "logits", 3e-4, False),
        ("tiny_packed", "streams.5", 3e-4, False),
        ("tiny_text", "loss", 6e-5, True),
        ("tiny_text", "loss", 3e-4, False),
        ("tiny_text", "grad.head.weight", 6e-5, True),
        ("tiny_packed", "grad.head.weight", 3e-4, False),
    ],
)
def test_limits(
    verify: Verify, spoilt: Spoilt, case: str, name: str, size: float, passes: bool
) -> None:
    code, (line,) = verify(spoilt(case, "outputs.safetensors", scale(name, 1 + size)))
    assert code == (0 if passes else 1), line
    if not passes:
        assert name.removeprefix("grad.") in failures(line)


def test_gradients_together_have_their_own_limit(verify: Verify, spoilt: Spoilt) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        for name, tensor in outputs.items():
            if name.startswith("grad."):
                tensor *= 1 + 7e-6

    code, (line,) = verify(spoilt("tiny_text_noqat", "outputs.safetensors", change))
    assert code == 1
    assert failures(line).startswith("all gradients together: 7")
    assert "more" not in line


def test_a_reference_gradient_of_zero_admits_only_zero(verify: Verify, spoilt: Spoilt) -> None:
    change = scale("grad.layers.0.attn.wo_b.weight", 0.0)
    code, (line,) = verify(spoilt("tiny_text", "outputs.safetensors", change))
    assert code == 1
    assert "zero gradients layers.0.attn.wo_b.weight: 2048 of 2048 differ" in failures(line)


def test_a_few_tokens_may_cross_a_rounding_boundary(verify: Verify, spoilt: Spoilt) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        outputs["streams.4"][0, 7] *= 1.001  # 1 of 69 live tokens is more than 1%

    code, (line,) = verify(spoilt("tiny_text", "outputs.safetensors", change))
    assert code == 1
    assert "layers streams.4:" in failures(line)
    assert "68 of 69 tokens within 0.0001, needs 99%" in line


def test_padding_is_not_compared(verify: Verify, spoilt: Spoilt) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        for name in ("logits", "streams.3", "pre_mix.3", "engram_out.1"):
            outputs[name][1, 33:] = 7.0
        outputs["topk.4"][1, 33:] = 3
        outputs["candidates.4"][1, 33:] = True

    code, (line,) = verify(spoilt("tiny_text", "outputs.safetensors", change))
    assert code == 0, line


@pytest.mark.parametrize(
    ("case", "name"),
    [("tiny_text", "topk.5"), ("tiny_packed", "topk.2"), ("tiny_packed", "topk.4")],
)
def test_one_other_selection_fails_unless_it_is_a_tie(
    verify: Verify, spoilt: Spoilt, edited: Callable[..., Path], case: str, name: str
) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        chosen = outputs[name][1, 29]
        absent = next(i for i in range(30) if i not in chosen.tolist())
        chosen[2] = absent

    folder = spoilt(case, "outputs.safetensors", change)
    code, (line,) = verify(folder)
    assert code == 1
    assert f"selections {name}: " in failures(line)
    code, (line,) = verify(edited(case, "case.json", smallest_topk_gap=0.0))
    assert code == 0, line


def test_the_order_of_a_selection_does_not_matter(verify: Verify, spoilt: Spoilt) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        outputs["topk.2"] = outputs["topk.2"].flip(-1).contiguous()

    assert verify(spoilt("tiny_text", "outputs.safetensors", change))[0] == 0


def test_one_other_candidate_fails(verify: Verify, spoilt: Spoilt) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        outputs["candidates.4"][1, 29, 2] ^= True

    code, (line,) = verify(spoilt("tiny_packed", "outputs.safetensors", change))
    assert code == 1
    assert failures(line).startswith("selections candidates.4: 1 of")


def test_what_we_do_not_compute_is_no_pass(verify: Verify, spoilt: Spoilt) -> None:
    def change(outputs: dict[str, Tensor]) -> None:
        outputs["grad.layers.9.attn.wkv.weight"] = torch.ones(3)
        outputs["topk.3"] = outputs["topk.2"].clone()

    code, (line,) = verify(spoilt("tiny_text", "outputs.safetensors", change))
    assert code == 1
    assert "gradients layers.9.attn.wkv.weight" in failures(line)
    assert "selections topk.3" in failures(line)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.safetensors", lambda t: t.pop("norm.weight"), "norm.weight is missing"),
        (
            "model.safetensors",
            lambda t: t.update({"norm.weight": torch.ones(63)}),
            "norm.weight has shape [63], not [64]",
        ),
        ("outputs.safetensors", lambda t: t.pop("logits"), "holds no tensor 'logits'"),
        (
            "outputs.safetensors",
            lambda t: t.update({"streams.2": t["streams.2"][:, :30].contiguous()}),
            "streams.2 has shape [2, 30, 4, 64]",
        ),
        ("inputs.safetensors", lambda t: t.pop("labels"), "holds no tensor 'labels'"),
    ],
)
def test_files_that_do_not_belong_together(
    verify: Verify, spoilt: Spoilt, file: str, change: Callable, message: str
) -> None:
    code, (line,) = verify(spoilt("tiny_packed", file, change))
    assert code == 65
    assert any(part in line for part in (f"{file}: ", f"{file} holds", "cannot be used:"))
    assert message in line


def test_a_tokenizer_of_another_size_is_named(verify: Verify, edited: Callable[..., Path]) -> None:
    folder = edited("tiny_text", "config.json", engram_compressed_vocab_size=322)
    code, (line,) = verify(folder)
    assert code == 65
    assert "323" in line
    assert "322" in line


@pytest.mark.parametrize(
    "entry",
    [
        {"sliding_window": 0},
        {"engram_num_embeddings": [384, 553]},
        {"compress_ratios": "2"},
        {"rope_scaling": 3},
    ],
)
def test_a_config_that_breaks_a_rule_is_bad_data(
    verify: Verify, edited: Callable[..., Path], entry: dict
) -> None:
    code, (line,) = verify(edited("tiny_text", "config.json", **entry))
    assert code == 65
    assert "config.json: " in line or next(iter(entry)) in line


def test_two_dtypes_are_bad_data(verify: Verify, edited: Callable[..., Path]) -> None:
    code, (line,) = verify(edited("tiny_text", "case.json", dtype="bfloat16"))
    assert code == 65
    assert "dtype bfloat16 in case.json, float32 in config.json" in line


def test_what_is_not_supported_is_skipped_with_its_reason(verify: Verify, spoilt: Spoilt) -> None:
    def change(inputs: dict[str, Tensor]) -> None:
        inputs["sounds"] = torch.ones(61, 3)

    sound = spoilt("tiny_packed", "inputs.safetensors", change)
    code, (line,) = verify(sound)
    assert code == 0
    assert "skipped" in line
    assert "sounds" in line
    assert verify("--strict", sound)[0] == 1
