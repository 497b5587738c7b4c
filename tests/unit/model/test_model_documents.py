"""Whole model: documents do not touch each other, and how they are packed changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from model.layout import ModelInputs

SHAPES = {
    "ratios 2 and 1": {},
    "ratio 4, documents shorter than it": {
        "num_hidden_layers": 4,
        "compress_ratios": (0, 4, 4, 4),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1, 2),
        "candidate_source_layer_id": 1,
        "candidate_block_size": 2,
    },
    "ratios 2 and 3": {
        "num_hidden_layers": 4,
        "compress_ratios": (2, 3, 3, 0),
        "kv_source_layer_ids": (0, 1),
        "index_source_layer_ids": (0, 1, 2),
        "candidate_source_layer_id": 1,
        "candidate_block_size": 2,
    },
}


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def rigs(make_config: Callable, make_rig: Callable) -> dict:
    return {name: make_rig(make_config(**shape), steady=True) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def rig(make_config: Callable, make_rig: Callable):
    """Its gates are free: for tests of equal bits."""
    return make_rig(make_config())


@pytest.fixture(scope="module")
def steady(rigs: dict):
    return rigs["ratios 2 and 1"]


def total_error(found: dict, wanted: dict) -> float:
    """Of all gradients as one vector."""
    wrong = sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted)
    return (wrong / sum(float(g.double().square().sum()) for g in wanted.values())) ** 0.5


def assert_same_gradients(found: dict, wanted: dict, relative: Callable) -> None:
    """To rounding; the gates must be steady."""
    assert found.keys() == wanted.keys()
    assert total_error(found, wanted) < 1e-5
    for name in wanted:
        # Some, those of the mHC scales above all, are small sums of large terms.
        assert relative(found[name], wanted[name]) < 1e-4, name


@pytest.mark.parametrize("shape", SHAPES)
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lengths=st.lists(st.integers(1, 21), min_size=1, max_size=5))
@example(lengths=[1, 1, 1])
@example(lengths=[3, 1, 30, 2])
def test_packed_documents_equal_each_alone(
    rigs: dict, relative: Callable, shape: str, lengths: list[int]
) -> None:
    rig = rigs[shape]
    documents = [tokens(n, seed) for seed, n in enumerate(lengths)]
    packed = rig.pack([documents])
    together = rig.run(packed)
    alone = [rig.run(rig.pack([[d]])) for d in documents]
    for place, one in zip(packed.places, alone, strict=True):
        assert relative(together.of(place), one.logits[0]) < 1e-5
    wanted = {n: sum(one.grads[n].double() for one in alone) for n in together.grads}
    if together.loss:
        assert float(together.loss) == pytest.approx(sum(float(a.loss) for a in alone), rel=1e-5)
        assert_same_gradients(together.grads, wanted, relative)
    else:
        assert all(not g.any() for g in together.grads.values())


@pytest.mark.parametrize("changed", [0, 1, 3])
def test_changing_one_document_leaves_the_others_bit_equal(rig, changed: int) -> None:
    documents = [tokens(n, n) for n in (9, 14, 1, 23)]
    before = rig.pack([documents, [tokens(12, 50)]])
    other = list(documents)
    other[changed] = tokens(len(documents[changed]), 77)
    after = rig.pack([other, [tokens(12, 50)]])

    row, column, length = before.places[changed]
    labels = before.labels.clone()
    labels[row, column : column + length] = -100
    one, two = rig.run(before, labels=[labels]), rig.run(after, labels=[labels])
    for i, place in enumerate(before.places):
        assert torch.equal(one.of(place), two.of(place)) == (i != changed)
    different = [n for n in one.grads if not torch.equal(one.grads[n], two.grads[n])]
    assert different == []


def test_a_changed_document_changes_the_gradients_it_causes(rig) -> None:
    documents = [tokens(9, 1), tokens(14, 2)]
    one, two = rig.run(rig.pack([documents])), rig.run(rig.pack([[tokens(9, 3), documents[1]]]))
    same = [n for n in one.grads if torch.equal(one.grads[n], two.grads[n])]
    assert same == []


def test_gradients_do_not_depend_on_how_documents_are_split(steady, relative: Callable) -> None:
    rig = steady
    documents = [tokens(n, n) for n in (9, 14, 1, 23, 12, 5)]
    one_row = rig.run(rig.pack([documents]))
    splits = {
        "rows": [[documents[:2], documents[2:3], documents[3:]]],
        "micro-batches": [[documents[:3]], [documents[3:]]],
        "each alone": [[[d]] for d in documents],
        "another order": [[documents[4:], documents[2:4]], [documents[:2]]],
        "wide rows": [[documents[3:], []], [documents[:3], []]],
    }
    for name, micro_batches in splits.items():
        width = 80 if name == "wide rows" else None
        found = rig.run(*[rig.pack(rows, width=width) for rows in micro_batches])
        assert float(found.loss) == pytest.approx(float(one_row.loss), rel=1e-5), name
        assert_same_gradients(found.grads, one_row.grads, relative)


def test_free_gates_do_not_depend_on_the_split_either(rig) -> None:
    documents = [tokens(n, n) for n in (9, 14, 1, 23, 12, 5)]
    one_row = rig.run(rig.pack([documents]))
    found = rig.run(rig.pack([documents[:2], documents[2:3]]), rig.pack([documents[3:]]))
    assert float(found.loss) == pytest.approx(float(one_row.loss), rel=1e-5)
    assert total_error(found.grads, one_row.grads) < 1e-3
    gates = [n for n in found.grads if n.endswith(("q_weight", "k_weight"))]
    assert len(gates) == 4 and all(found.grads[n].any() for n in gates)


@pytest.mark.parametrize("quantised", [False, True])
def test_padding_alone_contributes_exactly_nothing(
    make_config: Callable, make_rig: Callable, quantised: bool
) -> None:
    config = make_config()
    rig = make_rig(replace(config, qat=type(config.qat)(*[quantised] * 3)), steady=True)
    nothing = rig.run(rig.pack([[], []], width=11))
    assert float(nothing.loss) == 0.0
    assert all(not g.any() for g in nothing.grads.values())
    assert nothing.logits.isfinite().all()

    documents = [[tokens(9, 1), tokens(4, 2)]]
    with_padding = rig.run(rig.pack([*documents, []]), rig.pack([[], []], width=7))
    without = rig.run(rig.pack(documents))
    # With the quantisers on, a last bit may cross a rounding boundary.
    limit = 1e-3 if quantised else 1e-5
    assert float(with_padding.loss) == pytest.approx(float(without.loss), rel=limit)
    assert all(g.isfinite().all() for g in with_padding.grads.values())
    assert total_error(with_padding.grads, without.grads) < limit


def test_padding_routes_no_token_and_opens_no_gate(rig) -> None:
    packed = rig.pack([[], []], width=8)
    window = rig.store.open_window([packed.rows])
    out = rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels)
    assert not out.expert_counts.any()
    assert not out.engram_gate_mean.any()
    packed = rig.pack([[tokens(5, 1)], []], width=8)
    window = rig.store.open_window([packed.rows])
    out = rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels)
    assert out.expert_counts.sum(-1).tolist() == [[5 * 2, 0]] * 6
    assert ((out.engram_gate_mean > 0) & (out.engram_gate_mean < 1)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_any_width_is_taken(rigs: dict, relative: Callable, shape: str) -> None:
    rig = rigs[shape]
    document = tokens(13, 4)
    wide = rig.run(rig.pack([[document]], width=24))
    for width in (13, 14, 17, 23):
        narrow = rig.run(rig.pack([[document]], width=width))
        assert narrow.logits.shape == (1, width, rig.config.vocab_size)
        assert relative(narrow.logits[:, :13], wide.logits[:, :13]) < 1e-5
        assert_same_gradients(narrow.grads, wide.grads, relative)


def test_contents_of_padding_do_not_matter(rig) -> None:
    packed = rig.pack([[tokens(9, 1), tokens(5, 2)]], width=18)
    dead = packed.inputs.seq_ids == 0
    ids = packed.inputs.input_ids.masked_fill(dead, 123)
    rows = packed.rows.clone()
    rows[dead] = 7
    inputs = ModelInputs(
        ids, packed.inputs.seq_ids, packed.inputs.position_ids, packed.inputs.token_types
    )
    one, two = rig.run(packed), rig.run(replace(packed, inputs=inputs, rows=rows))
    for place in packed.places:
        assert torch.equal(one.of(place), two.of(place))
    assert float(one.loss) == float(two.loss)
    different = [n for n in one.grads if not torch.equal(one.grads[n], two.grads[n])]
    assert different == []


def test_image_tokens_are_dead_for_engram_and_routed_by_their_own_bias(rig) -> None:
    packed = rig.pack([[tokens(20, 1)]])
    types = packed.inputs.token_types.clone()
    types[0, 5:9] = torch.tensor([0, 1, 1, 3])
    image = types >= 0
    plain = rig.run(packed)
    one = rig.run(replace(packed, inputs=replace(packed.inputs, token_types=types)))
    assert torch.equal(one.logits[0, :5], plain.logits[0, :5])
    assert not torch.equal(one.logits[0, 5:], plain.logits[0, 5:])

    other_rows = packed.rows.clone()
    other_rows[image] = 7
    two = rig.run(
        replace(packed, inputs=replace(packed.inputs, token_types=types), rows=other_rows)
    )
    assert torch.equal(one.logits, two.logits)
    assert [n for n in one.grads if not torch.equal(one.grads[n], two.grads[n])] == []

    gate = rig.model.layers[0].ffn.gate
    before = gate.bias_vl.clone()
    try:
        gate.bias_vl[:] = 0
        gate.bias_vl[:2] = 1e3
        window = rig.store.open_window([packed.rows])
        inputs = replace(packed.inputs, token_types=types)
        counts = rig.model(inputs, engram=window.rows(0)).expert_counts[0]
        text = replace(packed.inputs, token_types=torch.full_like(types, -1))
        plain_counts = rig.model(text, engram=window.rows(0)).expert_counts[0]
    finally:
        gate.bias_vl.copy_(before)
    assert counts[1].tolist() == [4, 4] + [0] * 6
    assert counts[0].sum() == 16 * 2
    assert plain_counts.sum(1).tolist() == [20 * 2, 0]


def test_no_token_sees_a_later_one(rig) -> None:
    document = tokens(40, 8)
    other = document[:25] + tokens(15, 9)
    one, two = rig.run(rig.pack([[document]])), rig.run(rig.pack([[other]]))
    assert torch.equal(one.logits[:, :25], two.logits[:, :25])
    assert not torch.equal(one.logits[:, 25:], two.logits[:, 25:])


TWICE = """
import torch
from conftest import BASE, Rig

torch.set_num_threads(2)
ids = torch.randint(3, 400, (256,), generator=torch.Generator().manual_seed(0)).tolist()
rig = Rig(BASE)
packed = rig.pack([[ids[:60], ids[60:99]], [ids[99:]]])
one, two = rig.run(packed), rig.run(packed)
assert torch.equal(one.logits, two.logits) and torch.equal(one.loss, two.loss)
different = [n for n in one.grads if not torch.equal(one.grads[n], two.grads[n])]
print(torch.get_num_threads(), len(one.grads) > 100, different)
"""


def test_the_same_twice_on_two_threads() -> None:
    """In a process of its own: threads that wait actively crawl where others use the cores."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[2])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "passive"}
    environment["OMP_NUM_THREADS"] = "2"
    done = subprocess.run(
        [sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split(maxsplit=2) == ["2", "True", "[]\n"], done.stderr


@pytest.mark.parametrize("workspace_mb", [1, 64])
def test_the_workspace_changes_nothing_but_memory(
    steady, make_config: Callable, make_rig: Callable, relative: Callable, workspace_mb: int
) -> None:
    packed = steady.pack([[tokens(150, 1), tokens(33, 2)]])
    other = make_rig(make_config(workspace_mb=workspace_mb), steady=True)
    one, two = steady.run(packed), other.run(packed)
    assert relative(two.logits, one.logits) < 1e-5
    assert_same_gradients(two.grads, one.grads, relative)
