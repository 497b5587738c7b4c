"""How much of what dense attention would look at the selection holds, on a few queries."""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention.attend import AttentionSettings, queries
from model.layout import VisibleRange

PROBES = 8  # queries looked at in one layer and micro-batch


def recall_probes(seen: VisibleRange, *, topk: int) -> Tensor:
    """The queries to look at, int64, as indices into `seen`: up to PROBES, evenly spaced among
    those that see more entries than a selection holds. The others hold everything."""
    choosing = (seen.high - seen.low > topk).nonzero()[:, 0]
    count = min(PROBES, len(choosing))
    middles = 2 * torch.arange(count, device=choosing.device) + 1  # of `count` equal stretches
    return choosing[middles * len(choosing) // (2 * max(count, 1))]


@torch.no_grad()
def selection_recall(
    q_latent: Tensor,
    wq_b: Tensor,
    kv: Tensor,
    sink: Tensor,
    *,
    probes: Tensor,
    turn: Tensor,
    start: Tensor,
    entries: Tensor,
    selected: Tensor,
    seen: VisibleRange,
    settings: AttentionSettings,
) -> Tensor:
    """[sum of shares, queries measured], fp32 [2], over the queries `probes`; the other arguments
    are those of `attend`.

    A query's share: let all heads attend to the window, the sink and EVERY visible entry; of what
    they together give the entries, the part that falls on the selected ones. A query that gives the
    entries nothing does not count. One query's scores exist at a time.
    """
    if len(probes) == 0:
        return kv.new_zeros(2, dtype=torch.float32)
    before = len(kv) - len(q_latent)
    q = queries(q_latent[probes], wq_b, turn[probes], settings).float()
    places = torch.stack([probes, start[probes], seen.low[probes], seen.high[probes]], dim=1)
    shares = [
        _share(
            own,
            kv[before + max(first, t + 1 - settings.window) : before + t + 1].float(),
            entries[low:high].float(),
            sink.float(),
            selected[t] - low,
        )
        for own, (t, first, low, high) in zip(q, places.tolist(), strict=True)
    ]
    return torch.stack(shares).sum(0)


def _share(q: Tensor, near: Tensor, far: Tensor, sink: Tensor, chosen: Tensor) -> Tensor:
    """[its share, 1] of one query, or zeros: q [H, d], near [n, d], far [m, d], sink [H].

    chosen [K] counts rows of far and is negative where absent.
    """
    scores = torch.cat([q @ far.t(), q @ near.t()], dim=-1) * q.shape[-1] ** -0.5
    p = torch.softmax(torch.cat([scores, sink[:, None]], dim=-1), dim=-1)
    mass = p[:, : len(far)].sum(0)
    total, held = mass.sum(), mass[chosen[chosen >= 0]].sum()
    return torch.stack([held / total.masked_fill(total == 0, 1.0), (total > 0).float()])
