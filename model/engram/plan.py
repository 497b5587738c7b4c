"""How the rows of a step's windows travel: which of them each rank asks of which other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engram.distinct import Distinct
from model.engram.division import Division
from model.engram.exchange import Exchange, Pending


@dataclass(frozen=True)
class WindowPlan:
    """A window's rows in the order of its buffers: by primary, then layer, then id.

    So both what an owner sends and what a primary receives is one piece. ends [primaries + 1]:
    where each primary's piece begins. places: by layer, where its ids stand; None if layer after
    layer. at_owner, at_primary: int32 [U], the row numbers there, see Division.
    """

    distinct: Distinct
    ends: list[int]
    places: list[Tensor] | None
    at_owner: Tensor
    at_primary: Tensor

    @classmethod
    def of(cls, distinct: Distinct, division: Division) -> WindowPlan:
        ids, layers = distinct.ids, range(len(distinct.ids))
        primaries = division.owners * division.replicas
        cuts = [torch.searchsorted(ids[i], division.lows[i]) for i in layers]
        counts = [
            torch.diff(cut, append=torch.tensor([len(own)]))
            for cut, own in zip(cuts, ids, strict=True)
        ]
        by_piece = torch.stack(counts, dim=1).flatten() if counts else torch.zeros(0).long()
        begins = (by_piece.cumsum(0) - by_piece).view(primaries, len(ids))
        size = distinct.size
        at_owner = torch.empty(size, dtype=torch.int32)
        at_primary = at_owner if division.replicas == 1 else torch.empty_like(at_owner)
        places = []
        for i in layers:

            def spread(per_primary: Tensor, count: Tensor = counts[i]) -> Tensor:
                return per_primary.repeat_interleave(count)

            place = torch.arange(len(ids[i])) + spread(begins[:, i] - cuts[i])
            at_owner[place] = (ids[i] + spread(division.to_owner[i])).int()
            if division.replicas > 1:
                at_primary[place] = (ids[i] + spread(division.to_primary[i])).int()
            places.append(place)
        ends = [*begins[:, 0].tolist(), size] if places else [0] * (primaries + 1)
        return cls(distinct, ends, places if primaries > 1 else None, at_owner, at_primary)

    def inverses(self) -> list[list[Tensor]]:
        """As Distinct.inverses, but pointing into the window's buffers."""
        if self.places is None:
            return self.distinct.inverses
        return [
            [place[inverse] for place, inverse in zip(self.places, batch, strict=True)]
            for batch in self.distinct.inverses
        ]


@dataclass(frozen=True)
class Requests:
    """Row numbers that the ranks want of this one, in one role: by rank, of all windows in turn.

    counts: by rank, how many belong to each window.
    """

    ids: dict[int, Tensor]
    counts: list[list[int]]

    def of(self, window: int) -> dict[int, Tensor]:
        """Those of one window, in rank order."""
        return {rank: own.split(self.counts[rank])[window] for rank, own in self.ids.items()}

    def outside(self, rows: int) -> bool:
        """Whether any is no row among `rows`."""
        return any(
            len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows
            for ids in self.ids.values()
        )


class StepPlan:
    """The windows of a step, and what the other ranks ask of this one.

    All ranks make it together, while the step before computes: it reads no value. Ids travel as
    int32 row numbers of their holder, once to the owner and, where that is another rank, once to
    the primary. sent: bytes that making it has sent. first: the first window's values, once they
    are on their way.
    """

    def __init__(
        self, parts: Sequence[Distinct], *, division: Division, exchange: Exchange
    ) -> None:
        self.windows = [WindowPlan.of(part, division) for part in parts]
        self._division, self._exchange = division, exchange
        replica, primaries = exchange.rank // division.owners, range(exchange.size)
        self._primaries = [division.rank(p) for p in primaries]
        # The ranks of this owner group; each has the pieces of `replicas` primaries.
        self._owners = [replica * division.owners + owner for owner in range(division.owners)]
        counts = torch.zeros(exchange.size, 2, len(parts), dtype=torch.int64)
        asked = [self.by_owner(w, plan.at_owner) for w, plan in enumerate(self.windows)]
        given = [self.by_primary(w, plan.at_primary) for w, plan in enumerate(self.windows)]
        for role, pieces in enumerate((asked, given)):
            for w, by_rank in enumerate(pieces):
                for rank, piece in by_rank.items():
                    counts[rank, role, w] = len(piece)
        if exchange.size > 1:
            counts = exchange.all_to_all(counts)
        self._settled, self._pending = exchange.size == 1, []
        # Of this rank as owner, and as primary.
        self.asked = self._requests(asked, counts[:, 0])
        same = division.replicas == 1
        self.given = self.asked if same else self._requests(given, counts[:, 1])
        self.sent = exchange.take_sent()
        self.first: tuple[Pending, Tensor] | None = None

    def by_owner(self, window: int, buffer: Tensor) -> dict[int, Tensor]:
        """A window's buffer [U, ...] cut by the ranks that own its rows, in rank order."""
        ends = self.windows[window].ends[:: self._division.replicas]
        return {rank: buffer[ends[i] : ends[i + 1]] for i, rank in enumerate(self._owners)}

    def by_primary(self, window: int, buffer: Tensor) -> dict[int, Tensor]:
        """A window's buffer [U, ...] cut by the ranks that master its rows, in rank order."""
        ends = self.windows[window].ends
        cut = {rank: buffer[ends[p] : ends[p + 1]] for p, rank in enumerate(self._primaries)}
        return dict(sorted(cut.items()))

    def settle(self) -> None:
        """Wait for the other ranks' ids. ValueError, on all ranks, if some are no rows of ours."""
        if self._settled:
            return
        for pending in self._pending:
            pending.wait()
        self._settled = True
        division, rank = self._division, self._exchange.rank
        bad = self.asked.outside(division.owned_rows(rank % division.owners))
        bad |= self.given.outside(division.mastered_rows(division.primary(rank)))
        if self._exchange.agree(bad):
            raise ValueError(
                "Engram row ids arrived changed from another rank, so other rows would be read; "
                "use another network transport (unset the communication library's plug-in)"
            )

    def _requests(self, pieces: Sequence[dict[int, Tensor]], counts: Tensor) -> Requests:
        """Begin to send the ids of all windows; what the others send is there after `settle`."""
        mine = {rank: torch.cat([w[rank] for w in pieces]) for rank in pieces[0]}
        arriving = {
            rank: torch.empty(int(total), dtype=torch.int32)
            for rank, total in enumerate(counts.sum(1).tolist())
        }
        me = self._exchange.rank
        if me in mine:
            arriving[me] = mine.pop(me)
        others = {rank: ids for rank, ids in arriving.items() if rank != me}
        self._pending.append(self._exchange.begin(mine, others))
        return Requests(arriving, counts.tolist())
