"""Compiled functions: the same results, plain ones where a compiler fails, nothing when off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import compiled
from model.compiled import Compiled
from model.config import CompileConfig
from model.norm import RMSNorm, rms_norm

NAMES = ("engram_gate", "hyper_connection", "norm")
DOCUMENTS = [[list(range(9, 40)), [7, 8, 9, 10, 11]]]
# What a fresh process says and computes: argv holds the switches that are on.
PROGRAM = """
import json, logging, sys
from dataclasses import replace
from pathlib import Path
import torch
from model.config import CompileConfig, ModelConfig
from model.engram.owners import OwnerStore
from model.init import init_weights
from model.layout import ModelInputs
from model.transformer import DeepseekV41

config = ModelConfig.from_released(json.loads(Path(sys.argv[1]).read_text()))
config = replace(config, compile=CompileConfig(**dict.fromkeys(sys.argv[2:], True)))
model, store = DeepseekV41(config), OwnerStore(config, seed=0)
init_weights(model, seed=0, std=0.1)
ids = torch.arange(20)[None]
inputs = ModelInputs(ids, torch.ones_like(ids), ids, torch.full_like(ids, -1))
window = store.open_window([torch.zeros(1, 20, 2, 6, dtype=torch.int64)])
out = model(inputs, engram=window.rows(0), labels=ids)
out.loss_sum.backward()
norm = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
print(out.loss_sum.item(), norm, "torch._dynamo" in sys.modules)
"""


def in_a_process(golden: Path, *names: str, **environ: str) -> tuple[str, str]:
    """Standard output and error."""
    words = [sys.executable, "-c", PROGRAM, str(golden / "tiny_text/config.json"), *names]
    path = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env={**path, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def plain_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch.compile traces, differentiates and runs as ever, but makes no machine code. Yields the
    names of the functions as they are compiled."""
    made: list[str] = []
    own = torch.compile

    def traced(function: Callable, **options: object) -> Callable:
        made.append(function.__name__)
        return own(function, backend="aot_eager", **options)  # pyright: ignore

    monkeypatch.setattr(torch, "compile", traced)
    compiled._compiled.cache_clear()
    yield made
    compiled._compiled.cache_clear()


@pytest.fixture
def told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """What has been said so far."""
    monkeypatch.setattr(compiled, "_said", set())
    caplog.set_level("WARNING", logger="model.compiled")
    return lambda: caplog.messages


def test_each_switch_compiles_its_functions_alone(
    make_config: Callable, make_rig: Callable, plain_backend: list[str], relative: Callable
) -> None:
    small = make_config(num_hidden_layers=2)
    plain = make_rig(small, steady=True)
    wanted = plain.run(plain.pack(DOCUMENTS))
    assert plain_backend == []
    for name, functions in zip(
        NAMES, (["engram_gate"], ["expand", "read"], ["rms_norm"]), strict=True
    ):
        rig = make_rig(replace(small, compile=CompileConfig(**{name: True})), steady=True)
        found = rig.run(rig.pack(DOCUMENTS))
        assert sorted(plain_backend) == functions
        plain_backend.clear()
        assert relative(found.logits, wanted.logits) < 1e-5
        for gradient, other in wanted.grads.items():
            assert relative(found.grads[gradient], other) < 1e-4, (name, gradient)


def test_evaluation_runs_the_plain_functions(make_config: Callable, make_rig: Callable) -> None:
    model = make_rig(make_config(compile=CompileConfig(norm=True))).model
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    assert all(isinstance(m.function, Compiled) for m in norms)
    model.eval()
    assert all(m.function is rms_norm for m in norms)
    model.train()
    assert all(isinstance(m.function, Compiled) for m in norms)


def broken(*_args: object) -> Tensor:
    raise RuntimeError("no compiler on this machine\nand a second line")


def test_a_failure_is_told_once_and_the_plain_function_runs(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    x, weight = torch.randn(3, 8), torch.randn(8)
    for name in NAMES:
        own = Compiled(rms_norm, name=name)
        for _ in range(3):
            assert torch.equal(own(x, weight, 1e-6), rms_norm(x, weight, 1e-6))
    assert told() == [
        "model.compile.engram_gate runs uncompiled, as does what else meets this error: "
        "RuntimeError: no compiler on this machine"
    ]


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        raise RuntimeError("the backward does not compile")


def test_a_backward_that_does_not_compile_is_found_by_the_first_forward(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: _NoWayBack.apply)
    own = Compiled(rms_norm, name="norm")
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    own(x, weight, 1e-6).sum().backward()
    (expected,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).sum(), x)
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert len(told()) == 1


def test_wrong_arguments_are_no_fault_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(RuntimeError, match="size"):
        Compiled(rms_norm, name="norm")(torch.randn(3, 8), torch.randn(7), 1e-6)


def test_with_the_switches_off_the_compiler_is_not_even_imported(golden_folder: Path) -> None:
    off, silence = in_a_process(golden_folder)
    assert silence == ""
    assert off.split()[2] == "False"  # 130 MB and seconds that a run can save


@pytest.mark.slow
def test_without_a_compiler_a_process_says_so_in_one_line_and_goes_on(
    golden_folder: Path, tmp_path: Path
) -> None:
    nothing = {"PATH": "", "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    off, _ = in_a_process(golden_folder, **nothing)
    on, said = in_a_process(golden_folder, *NAMES, **nothing)
    assert on.split()[:2] == off.split()[:2]
    assert len(said.splitlines()) == 1
    assert "runs uncompiled" in said and "No working C++ compiler" in said


@pytest.mark.long
def test_with_a_compiler_results_are_those_without(golden_folder: Path, tmp_path: Path) -> None:
    off, _ = in_a_process(golden_folder)
    place = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    on, said = in_a_process(golden_folder, "engram_gate", "hyper_connection", **place)
    assert said == ""
    for left, right in zip(off.split()[:2], on.split()[:2], strict=True):
        assert float(right) == pytest.approx(float(left), rel=1e-4)
