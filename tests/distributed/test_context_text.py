"""A context group of ranks computes what one rank does, on packed text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from data.batch import Stretch
from model.config import QatConfig
from model.layout import ModelInputs
from model.parallel.mesh import build_mesh
from tests.context import Case, compute, model_inputs, relative, require_equal, tokens
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def documents(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed) for seed, n in enumerate(lengths, start=1)]


RATIO_4 = {
    "num_hidden_layers": 4,
    "compress_ratios": (0, 4, 4, 4),
    "kv_source_layer_ids": (1,),
    "index_source_layer_ids": (1, 2),
    "candidate_source_layer_id": 1,
    "candidate_block_size": 2,
}
LEARNING = {"distill": True}
CASES = {
    "a document over all shards": Case([documents(64)]),
    "borders of documents and shards apart": Case([documents(13, 1, 22, 2, 17)]),
    "two rows": Case([documents(30, 9), documents(5, 3, 1, 20)]),
    "shards below the window": Case([documents(9, 5)]),
    "an odd length": Case([documents(37)]),
    "shards of padding, and a whole row": Case([documents(7), []], width=48),
    "documents below the ratio": Case([documents(3, 30, 1, 2)], changes=RATIO_4),
    "an indexer that learns, tiles": Case(
        [documents(70, 21)], changes={"index_topk": 4, "workspace_mb": 1}, options=LEARNING
    ),
    "full": Case(
        [documents(40, 13)],
        changes={"index_topk": 4},
        options=LEARNING | {"recompute": "full"},
    ),
    "selective": Case(
        [documents(40, 13), documents(20)],
        changes={"index_topk": 4},
        options=LEARNING | {"recompute": "selective"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_compute_what_one_does(ranks: Ranks, name: str) -> None:
    wanted = compute(CASES[name])
    for found in ranks.run(4, compute, CASES[name], 4):
        require_equal(found, wanted)


def test_two_ranks_compute_what_one_does(ranks: Ranks) -> None:
    case = CASES["full"]
    wanted = compute(case)
    for found in ranks.run(2, compute, case, 2):
        require_equal(found, wanted)


def test_a_documents_bits_do_not_depend_on_its_neighbours(ranks: Ranks) -> None:
    """Three ranks; the documents before and after lie on the same ones."""
    middle = tokens(25, 1)
    results = []
    for seed in (2, 3):
        rows = [[tokens(9, seed), middle, tokens(12, seed + 2)]]
        case = Case(rows, learnt=1, options={"steady": False})
        results.append(ranks.run(3, compute, case, 3)[1])
    one, other = results
    assert torch.equal(one.logits[0, 10:35], other.logits[0, 10:35])
    assert not torch.equal(one.logits[0, :9], other.logits[0, :9])
    assert all(torch.equal(one.grads[name], other.grads[name]) for name in one.grads)
    assert sum(bool(grad.any()) for grad in one.grads.values()) > 60


def test_the_published_types(ranks: Ranks) -> None:
    """bfloat16 and all quantisers: a choice here and there falls otherwise, the sums hardly."""
    changes = {"dtype": "bfloat16", "qat": QatConfig()}
    options = LEARNING | {"recompute": "full"}
    case = Case([documents(50, 13), documents(64)], changes=changes, options=options)
    wanted = compute(case)
    for found in ranks.run(2, compute, case, 2):
        assert found.grads.keys() == wanted.grads.keys()
        assert relative(found.figures["loss_sum"], wanted.figures["loss_sum"]) < 0.01
        assert relative(found.figures["index_loss"], wanted.figures["index_loss"]) < 0.05
        for name in ("head.weight", "layers.5.attn.wkv.weight", "layers.4.attn.indexer.wk.weight"):
            assert relative(found.grads[name], wanted.grads[name]) < 0.3, name


def selections(case: Case, world: int, ties: bool) -> list[Tensor]:
    """What each index source selects, [B * S, topk] over whole rows."""
    mesh = build_mesh(cp=world)
    rig = case.rig(mesh)
    batch = case.batch(rig, Stretch(mesh.cp.rank, world, rig.config.alignment))
    found: list[Tensor] = []

    def keep(module, args, out) -> None:
        if out.published is not None:
            found.append(out.published.selected)

    for layer in rig.model.layers:
        layer.get_submodule("attn").register_forward_hook(keep)
        if ties and layer.get_submodule("attn").role in ("source", "reindex"):
            torch.nn.init.zeros_(layer.get_parameter("attn.indexer.weights_proj.weight"))
    with torch.no_grad():
        window = rig.store.open_window([batch.engram_rows])
        rig.model(model_inputs(batch), engram=window.rows(0), head=False)
    rows = len(case.rows)
    parts = [mesh.cp.all_gather(part.unflatten(0, (rows, -1))) for part in found]
    return [part.transpose(0, 1).flatten(0, 2) for part in parts]


@pytest.mark.parametrize("ties", [False, True])
def test_what_is_selected_is_the_same(ranks: Ranks, ties: bool) -> None:
    """With `ties` all scores are 0, and the lower positions win."""
    case = Case([documents(50, 13), documents(2, 61)], width=64, changes={"index_topk": 4})
    wanted = selections(case, 1, ties)
    assert len(wanted) == 3
    for found in ranks.run(4, selections, case, 4, ties):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    last = wanted[0][49].tolist()
    assert (last == [0, 1, 2, 3]) == ties


def whole_rows(case: Case) -> tuple[Tensor, str]:
    """Logits of rows that are not divided, and what is said of those that are divided badly."""
    rig = case.rig(build_mesh(cp=2))
    batch = case.batch(rig)
    inputs, window = model_inputs(batch), rig.store.open_window([batch.engram_rows])
    with torch.no_grad():
        logits = rig.model(inputs, engram=window.rows(0)).logits
        narrow = ModelInputs(inputs.input_ids[:, :8], *list(vars(inputs).values())[1:])
        with pytest.raises(ValueError, match="divide rows") as error:
            rig.model(narrow, engram=window.rows(0))
    return logits, str(error.value)


def test_whole_rows_are_computed_by_every_rank_for_itself(ranks: Ranks) -> None:
    """As samples and other short texts are."""
    case = Case([documents(19)], width=20)
    wanted = compute(case).logits
    for logits, said in ranks.run(2, whole_rows, case):
        assert torch.equal(logits, wanted)
        assert "a rank's 8 of 20 columns are not one of 2 equal stretches of a multiple" in said
