"""The command: what it prints and how it exits, for good, spoilt, foreign and broken folders."""

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


def test_exact_cases_pass(verify: Verify, golden: Path) -> None:
    code, lines = verify(golden / "hash_released", golden / "quantization")
    assert code == 0
    assert lines[0].split()[:2] == ["hash_released", "pass"]
    assert "token map 129282/129282" in lines[0]
    assert "rows 98304/98304" in lines[0]
    assert lines[1].split()[:2] == ["quantization", "pass"]
    assert "quantisers 69120/69120" in lines[1]
    assert "decoders 13760/13760" in lines[1]


def bump(name: str, *index: int) -> Callable[[dict[str, Tensor]], None]:
    """One more at one place of an integer tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][index] += 1

    return change


@pytest.mark.parametrize(
    ("name", "index", "group"),
    [
        ("token_map", (12345,), "token map"),
        ("primes", (1, 23), "constants"),
        ("offsets", (0, 1), "constants"),
        ("multipliers", (1, 3), "constants"),
        ("rows_plain", (0, 17, 1, 5), "rows"),
        ("rows_packed", (1, 200, 0, 0), "rows"),
        ("rows_masked", (0, 0, 0, 0), "rows"),
        ("rows_packed_masked", (1, 255, 1, 23), "rows"),
    ],
)
def test_one_changed_number_fails_the_hash_case(
    verify: Verify, spoilt: Spoilt, name: str, index: tuple[int, ...], group: str
) -> None:
    code, (line,) = verify(spoilt("hash_released", "hash.safetensors", bump(name, *index)))
    assert code == 1
    assert "FAIL" in line
    assert f"failed: {group} {name}: 1 of" in line
    assert "more" not in line


@pytest.mark.parametrize("entry", ["compressed_vocab_size", "table_rows"])
def test_another_hash_geometry_is_refused(
    verify: Verify, golden: Path, tmp_path: Path, entry: str
) -> None:
    folder = tmp_path / "case"
    shutil.copytree(golden / "hash_released", folder)
    document = json.loads((folder / "case.json").read_text())
    document[entry] = [384006168, 384016681] if entry == "table_rows" else 99091
    (folder / "case.json").write_text(json.dumps(document))
    code, (line,) = verify(folder)
    assert code != 0
    assert "384016682" in line or "compressed_vocab_size" in line


@pytest.mark.parametrize(
    "name",
    [
        "fp8.float32",
        "fp8.bfloat16",
        "mxfp4.float32",
        "mxfp4.bfloat16",
        "nvfp4.float32",
        "nvfp4.bfloat16",
        "fp8_decoded",
        "fp4_decoded",
        "rows_decoded",
    ],
)
def test_one_changed_number_fails_the_quantisation_case(
    verify: Verify, spoilt: Spoilt, name: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        last = tensors[name][-1, -1]
        last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))

    code, (line,) = verify(spoilt("quantization", "quant.safetensors", change))
    assert code == 1
    assert f" {name}: 1 of" in line


def test_unknown_kind_is_skipped_and_fails_only_when_strict(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text('{"kind": "sound"}')
    code, (line,) = verify(tmp_path)
    assert code == 0
    assert "skipped" in line
    assert "'sound'" in line
    code, _ = verify("--strict", tmp_path)
    assert code == 1


def test_what_is_no_case_is_a_wrong_command_line(verify: Verify, tmp_path: Path) -> None:
    code, (line,) = verify(tmp_path)
    assert code == 2
    assert f"{tmp_path} has no case.json" in line
    code, (line,) = verify(tmp_path / "nowhere")
    assert code == 2
    assert "is no folder" in line


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "no readable JSON"),
        ("[1]", "no JSON object"),
        ("{}", 'names no "kind"'),
        ('{"kind": "quantization"}', "quant.safetensors is missing"),
        ('{"kind": "engram_hash"}', "hash.safetensors is missing"),
        ('{"kind": "model", "dtype": "float32"}', "is missing"),
    ],
)
def test_a_broken_case_is_bad_data(
    verify: Verify, tmp_path: Path, document: str, message: str
) -> None:
    (tmp_path / "case.json").write_text(document)
    code, (line,) = verify(tmp_path)
    assert code == 65
    assert message in line


def test_a_cut_file_is_bad_data(verify: Verify, golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantization"
    shutil.copytree(golden / "quantization", folder)
    file = folder / "quant.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, (line,) = verify(folder)
    assert code == 65
    assert "quant.safetensors is no readable safetensors file" in line


def test_a_missing_input_is_named(verify: Verify, spoilt: Spoilt) -> None:
    folder = spoilt("quantization", "quant.safetensors", lambda t: t.pop("fp4_scale"))
    code, (line,) = verify(folder)
    assert code == 65
    assert "holds no tensor 'fp4_scale'" in line


def test_a_broken_case_hides_no_other(verify: Verify, golden: Path, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text("{")
    code, lines = verify(tmp_path, golden / "quantization")
    assert code == 65
    assert [line.split()[1] for line in lines] == ["error", "pass"]


def test_json_holds_every_comparison(verify_json: Callable[..., dict], golden: Path) -> None:
    found = verify_json(golden / "quantization")
    (case,) = found["cases"]
    assert (found["exit_code"], case["status"], case["failed"]) == (0, "pass", [])
    assert len(case["checks"]) == 9
    assert all(c["error"] == 0 for c in case["checks"])
    assert case["worst"]["decoders"]["total"] == 70 * 96
