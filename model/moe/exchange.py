"""Expert parallelism: tokens travel to the ranks that hold their experts, and the results back.

Rank r of n holds experts r E/n to (r + 1) E/n. A token's row goes once to a rank, however many of
its experts are there; of each slot comes back its own output, in the type of the activations, and
at home they are added as on one rank, in fp32 and in the order of expert numbers: the sum does not
depend on n. What the ranks have for each other is told first, and no split is padded.

Experts run in rounds, the same on all ranks. One round takes all unless some rank would receive far
more than any sends: a router that likes one rank's experts costs time then, not that rank's memory.
A token whose experts on one rank fall into several rounds is sent in each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.moe.grouped import Span
from model.moe.routed import ExpertWeights, Kept, Slots, run_backward, run_forward
from model.moe.router import Routing
from model.parallel.group import Group

# Slots that a rank may receive in a round, as a multiple of the most that any rank sends in all.
MOST_RECEIVED = 2


class Splits(NamedTuple):
    """How many rows of a message go to each rank, and come from each."""

    send: list[int]
    receive: list[int]


class Round(NamedTuple):
    """One round trip of a layer's tokens, and what this rank's experts run in it."""

    ep: Group
    token: Tensor  # [rows sent] int64, by destination
    rows: Splits
    outputs: Splits  # slots, there and back
    slots: Slots
    place: Tensor  # [S] int64, where in the message each of `slots` came and goes back

    def send_rows(self, x: Tensor) -> Tensor:
        """Rows of x [T, D] to the experts: the rows received here."""
        send, receive = self.rows
        return self.ep.all_to_all_rows(x.index_select(0, self.token), send=send, receive=receive)

    def send_back(self, outputs: Tensor) -> Tensor:
        """[S, ...] of the slots received, as they came: those of the slots that were sent."""
        there = self.outputs
        return self.ep.all_to_all_rows(outputs, send=there.receive, receive=there.send)

    def forward(self, rows: Tensor, experts: ExpertWeights) -> tuple[Tensor, Kept | None]:
        """rows received -> outputs [S, D] as `send_back` takes them, and what may be kept."""
        out = rows.new_empty(len(self.place), rows.shape[1])

        def put(span: Span, y: Tensor) -> None:
            out[self.place[span.rows]] = y

        return out, run_forward(rows, self.slots, experts, put=put)

    def backward(
        self,
        rows: Tensor | None,
        grad: Tensor,
        experts: ExpertWeights,
        *,
        by_w13: Tensor,
        by_w2: Tensor,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the slots' rows [S, D] and weights [S], as `send_back` takes them, those of
        the experts to by_w13 and by_w2; see `run_backward`."""
        by_row = grad.new_empty(len(self.place), grad.shape[1])
        by_weight = self.slots.weight.new_empty(len(self.place))

        def put(span: Span, row: Tensor, weight: Tensor) -> None:
            by_row[self.place[span.rows]] = row
            by_weight[self.place[span.rows]] = weight

        run_backward(
            rows, grad, self.slots, experts, by_w13=by_w13, by_w2=by_w2, put=put, kept=kept
        )
        return by_row, by_weight


class Trip(NamedTuple):
    """All rounds of a layer."""

    rounds: list[Round]
    slot: Tensor  # [m] int64, place in [T, k], flattened, of this rank's slots in expert order
    token: Tensor  # [m] int64
    whole: bool  # whether on every rank one group of experts takes all slots


class ExchangedExperts(torch.autograd.Function):
    """The experts of all ranks of `ep` over this rank's tokens; w13 and w2 are this rank's part.

    Backward sends the tokens again, with their gradients, unless one group of experts took all of
    them on every rank. All ranks exchange the same messages, whatever they have to say.
    """

    @staticmethod
    def forward(ctx, x, weights, w13, w2, known, routing, settings, ep):  # type: ignore[override]
        experts = ExpertWeights(w13, w2, *settings)
        trip = plan(routing, weights, experts, ep)
        ctx.save_for_backward(x, w13, w2)
        ctx.trip, ctx.settings, ctx.shape = trip, settings, weights.shape
        ctx.kept = None
        if known is not None:
            return known
        returned = []
        for turn in trip.rounds:
            out, kept = turn.forward(turn.send_rows(x), experts)
            ctx.kept = kept if trip.whole else None
            returned.append(turn.send_back(out))
            del out, kept
        back, size = _in_order(returned, trip), experts.workspace_bytes
        return _sum_slots(back, trip.token, like=x, workspace_bytes=size)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, w13, w2 = ctx.saved_tensors
        trip, experts = ctx.trip, ExpertWeights(w13, w2, *ctx.settings)
        by_w13, by_w2 = torch.empty_like(w13), torch.empty_like(w2)
        rows_back, weights_back = [], []
        kept = ctx.kept
        for turn in trip.rounds:
            rows = turn.send_rows(x) if kept is None else None
            by_y = turn.send_rows(grad)
            by_row, by_weight = turn.backward(
                rows, by_y, experts, by_w13=by_w13, by_w2=by_w2, kept=kept
            )
            rows_back.append(turn.send_back(by_row))
            weights_back.append(turn.send_back(by_weight))
            del rows, by_y, by_row
        by_weights = weights_back[0].new_zeros(ctx.shape)
        by_weights.view(-1)[trip.slot] = _in_order(weights_back, trip)
        back, size = _in_order(rows_back, trip), experts.workspace_bytes
        by_x = _sum_slots(back, trip.token, like=x, workspace_bytes=size)
        return by_x, by_weights, by_w13, by_w2, None, None, None, None


def plan(routing: Routing, weights: Tensor, experts: ExpertWeights, ep: Group) -> Trip:
    """Tell the other ranks what this one has for their experts, and lay out the rounds.

    The host waits for the device twice: for how many slots every rank has for every expert, and for
    how many rows that makes.
    """
    counts = ep.all_gather(routing.counts.sum(0))
    on_host = counts.cpu()
    slot = torch.argsort(routing.experts.flatten(), stable=True)[: int(on_host[ep.rank].sum())]
    load = on_host.sum(0).view(ep.size, -1)
    width, size = experts.w13.shape[2], experts.w13.element_size()
    # A slot takes three rows at most: its token's, the gradient's, and what goes back.
    room = experts.workspace_bytes // (3 * width * size)
    most = max(room, MOST_RECEIVED * int(on_host.sum(1).max()))
    intervals = _intervals(load, most=most)
    rounds = [
        _round(interval, slot, routing.experts, weights, counts, on_host, ep)
        for interval in intervals
    ]
    whole = len(rounds) == 1 and int(load.sum(1).max()) <= experts.most_slots
    return Trip(rounds, slot, slot // weights.shape[1], whole)


def _intervals(load: Tensor, *, most: int) -> list[tuple[int, int]]:
    """load [n, E / n]: slots of each rank's experts. Intervals of a rank's expert numbers that no
    rank receives more than `most` slots for, unless it is one expert."""
    ends = F.pad(load.cumsum(1), (1, 0))
    found, first = [], 0
    while first < load.shape[1]:
        received = (ends[:, first + 1 :] - ends[:, first, None]).amax(0)
        last = first + max(1, int((received <= most).sum()))
        found.append((first, last))
        first = last
    return found


def _round(
    interval: tuple[int, int],
    slot: Tensor,
    experts: Tensor,
    weights: Tensor,
    counts: Tensor,
    on_host: Tensor,
    ep: Group,
) -> Round:
    """slot [m]: all of this rank's slots in expert order; experts and weights [T, k]; counts
    [n, E], and the same on the host: what every rank has for every expert."""
    n, per, (first, last) = ep.size, counts.shape[1] // ep.size, interval
    tokens, k = experts.shape
    device = experts.device

    leaving = F.pad(on_host[ep.rank].cumsum(0), (1, 0))
    starts, stops = leaving[first::per][:n].tolist(), leaving[last::per][:n].tolist()
    slot = torch.cat([slot[start:stop] for start, stop in zip(starts, stops, strict=True)])
    arriving = on_host.view(n, n, per)[:, ep.rank, first:last]
    sent = [stop - start for start, stop in zip(starts, stops, strict=True)]
    outputs = Splits(sent, arriving.sum(1).tolist())

    # Number the tokens that each rank wants at least once.
    wish = slot // k * n + experts.flatten()[slot] // per
    wanted = torch.zeros(tokens, n, dtype=torch.int64, device=device)
    wanted.view(-1)[wish] = 1
    number = wanted.cumsum(0)
    leave = number[-1]
    ones = [1] * n
    arrive = ep.all_to_all_rows(leave[:, None], send=ones, receive=ones)[:, 0]
    rows = Splits(*torch.stack([leave, arrive]).tolist())
    total = sum(rows.send)
    position = torch.where(wanted > 0, number - 1 + leave.cumsum(0) - leave, total)
    token = torch.arange(tokens, device=device).repeat_interleave(n)
    # What nobody wants falls into one place more, which is cut off.
    token = token.new_empty(total + 1).scatter_(0, position.flatten(), token)[:total]

    # Each slot's row among those of its two ranks, and its routing weight, as it is.
    which = (number.flatten()[wish] - 1).int()
    message = torch.stack([which, weights.flatten()[slot].view(torch.int32)], dim=1)
    told = ep.all_to_all_rows(message, send=outputs.send, receive=outputs.receive)
    here = counts.view(n, n, per)[:, ep.rank, first:last]
    received = sum(outputs.receive)
    expert = torch.arange(last - first, device=device).repeat(n)
    expert = expert.repeat_interleave(here.flatten(), output_size=received)
    begin = (arrive.cumsum(0) - arrive).repeat_interleave(here.sum(1), output_size=received)
    place = torch.argsort(expert, stable=True)
    slots = Slots(
        row=(told[:, 0] + begin)[place],
        weight=told[:, 1].contiguous().view(torch.float32)[place],
        first=first,
        sizes=arriving.sum(0).tolist(),
    )
    return Round(ep, token, rows, outputs, slots, place)


def _in_order(returned: list[Tensor], trip: Trip) -> Tensor:
    """What came back in each round, in expert order over all of them."""
    if len(returned) == 1:
        return returned[0]
    splits = [
        back.split(turn.outputs.send) for back, turn in zip(returned, trip.rounds, strict=True)
    ]
    return torch.cat([part for by_rank in zip(*splits, strict=True) for part in by_rank])


def _sum_slots(rows: Tensor, token: Tensor, *, like: Tensor, workspace_bytes: int) -> Tensor:
    """Add rows [m, D] of slots in expert order to their tokens, in fp32, as `like` [T, D]."""
    out = torch.zeros_like(like, dtype=torch.float32)
    step = max(1, workspace_bytes // (4 * like.shape[1]))
    for part, where in zip(rows.split(step), token.split(step), strict=True):
        out.index_add_(0, where, part.float())
    return out.to(like.dtype)
