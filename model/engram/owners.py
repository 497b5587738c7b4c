"""The Engram tables that learn, in the memory of the ranks that own them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engram.distinct import agreed_windows
from model.engram.division import Division
from model.engram.exchange import Exchange, Pending
from model.engram.init import fill_rows
from model.engram.plan import StepPlan
from model.engram.primaries import GradientSums, PrimaryTable, TableGradients
from model.engram.store import WINDOW_BYTES, same_tensors
from model.engram.tables.table import sampled_rows
from model.engram.window import Figures, Window
from model.parallel.mesh import Mesh


def table_device(config: ModelConfig, device: torch.device) -> torch.device:
    """Where tables in memory lie, for a model on `device`: beside it, or with the host."""
    return torch.device("cpu") if config.engram.store == "host" else device


class OwnerStore:
    """Tables in memory that learn with the model, their rows divided over owners, see Division.

    A window's rows are asked for once, whatever reads them: their ids a step ahead, their values
    while the window before computes. Its gradients go straight to the ranks that master the rows
    while the next one computes. So the model's forward and backward hold no communication of
    tables. A rank alone needs no process group and sends nothing.

    A row's initial value is a function of (seed, layer, row id) alone, so any division of the
    tables over ranks starts from the same numbers.

    rows given to any method are host tensors, as the loader makes them; so their ids are checked
    on the host, on all ranks together, and no look-up waits for a device.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None,
        mesh: Mesh | None = None,
        learns: bool = True,
        window_bytes: int = WINDOW_BYTES,
        device: torch.device | None = None,
    ) -> None:
        """seed: of the initial values; None leaves them undefined, for weights to be read.

        learns: False for frozen tables, for which windows hold no gradient.
        window_bytes: bound of a window's values and gradients, unless one micro-batch needs more.
        device: where the model wants its values; with config.engram.store=host the tables stay in
        pinned host memory. All ranks of the mesh together; ValueError where the network does not
        carry row ids unchanged.
        """
        self.mesh, self.learns = mesh or Mesh(), learns
        self.layers = config.engram_layers
        self.rows = config.engram_num_embeddings[: len(self.layers)]
        self.looks_ahead = self.mesh.world.size > 1
        owners, replicas = self.mesh.owners.size, self.mesh.replicas.size
        self._division = Division(self.rows, owners, replicas)
        self._dim, self._device = config.engram_head_dim, device or torch.device("cpu")
        self._exchange = Exchange(self.mesh.world, device=self._device)
        self._most = max(1, window_bytes // ((8 if learns else 4) * self._dim))
        host = table_device(config, self._device).type == "cpu"
        self._table = torch.empty(
            self._division.owned_rows(self.mesh.owners.rank),
            self._dim,
            device=None if host else self._device,
            pin_memory=host and self._device.type != "cpu",
        )
        self._owned = [
            self._division.owned(index, self.mesh.owners.rank) for index in range(len(self.rows))
        ]
        self.weight = list(self._table.split([high - low for low, high in self._owned]))
        if seed is not None:
            std = config.initializer_range
            for layer, weight, (low, _) in zip(self.layers, self.weight, self._owned, strict=True):
                fill_rows(weight, low, layer=layer, seed=seed, std=std)
        self._ahead: list[tuple[list[Tensor], StepPlan]] = []
        self._sums: GradientSums | None = None
        self._figures = Figures()

    @property
    def low(self) -> list[int]:
        """By layer, the first row of `weight`."""
        return [low for low, _ in self._owned]

    @property
    def primary(self) -> list[PrimaryTable]:
        """By layer, the rows that this rank masters; all of them where it is alone."""
        found = []
        for index, (layer, (first, _)) in enumerate(zip(self.layers, self._owned, strict=True)):
            low, high = self._mastered(index, self.mesh.world.rank)
            found.append(PrimaryTable(layer, low, self.weight[index][low - first : high - first]))
        return found

    def read_ahead(self, rows: list[Tensor]) -> None:
        """Begin what `windows` will need for these very tensors, all but values that a step may
        still change. All ranks together."""
        plan = self._plan(rows, most=self._most)
        self._ahead.append((rows, plan))
        if not self.learns:
            self._fetch_first(plan)

    def windows(self, rows: list[Tensor]) -> Iterator[Window]:
        """The windows of a step's micro-batches, each [B, S, Engram layers, columns] int64.

        All ranks together, with as many micro-batches on each. The next window's values travel
        while the caller works on one, and the gradients left in one while it works on the next;
        `collect` has their sums. ValueError, on all ranks at once, names a row outside its table.
        """
        with self._waiting():
            plan = self._planned(rows)
            self._settle(plan)
            if self.learns:
                self._sums = GradientSums(plan, exchange=self._exchange, device=self._table.device)
            following, plan.first = plan.first or self._fetch(plan, 0), None
        for number in range(len(plan.windows)):
            with self._waiting():
                assert following is not None
                pending, values = following
                last = number + 1 == len(plan.windows)
                following = None if last else self._fetch(plan, number + 1)
                pending.wait()
                grads = torch.zeros_like(values, dtype=torch.float32) if self.learns else None
            yield self._window(plan, number, values, grads)
            if self._sums is not None and grads is not None:
                with self._waiting():
                    self._sums.begin(number, grads)

    def collect(self) -> TableGradients:
        """The gradients of the step whose `windows` have gone by, none of frozen tables. All ranks
        together."""
        if self._sums is None:
            assert not self.learns
            return TableGradients([], [])
        with self._waiting():
            found = self._sums.collect([len(table.weight) for table in self.primary])
        self._sums = None
        return found

    def open_window(self, rows: list[Tensor]) -> Window:
        """One window of some micro-batches, whatever its size. All ranks together, each with
        micro-batches of its own. Its gradients, if gradients are enabled, stay with the caller."""
        with self._waiting():
            plan = self._plan(rows, most=None)
            self._settle(plan)
            pending, values = self._fetch(plan, 0)
            pending.wait()
        learns = self.learns and torch.is_grad_enabled()
        grads = torch.zeros_like(values, dtype=torch.float32) if learns else None
        return self._window(plan, 0, values, grads)

    def publish(self, ids: Sequence[Tensor] | None) -> None:
        """Hand changed rows that this rank masters to the ranks that own copies of them.

        ids: by layer [n] int64, relative to PrimaryTable.low; None = all rows. All ranks call it
        together, after every change of primary weights and before the next look-up. Then the first
        window of what `read_ahead` has announced begins to travel.
        """
        assert all(plan.first is None for _, plan in self._ahead)
        self._figures.lookup_bytes += self._exchange.take_sent()
        peers = self._copies()
        if ids is None:
            self._publish_all(peers)
        elif peers:
            self._publish_rows(ids, peers)
        self._figures.replica_bytes += self._exchange.take_sent()
        for _, plan in self._ahead[:1]:
            self._fetch_first(plan)

    def as_global(self, index: int, tensor: Tensor) -> Tensor:
        """`tensor` [n, ...] of the primary rows of the index-th layer, as what all ranks hold
        together: a DTensor [rows, ...]; itself where this rank is alone."""
        if self.mesh.meshes is None:
            return tensor
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size([self.rows[index], *tensor.shape[1:]])
        return DTensor.from_local(
            tensor,
            self.mesh.meshes.tables,
            [Shard(0), Shard(0)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def take_figures(self) -> Figures:
        """What look-ups have cost since this was last asked."""
        found, self._figures = self._figures, Figures()
        found.lookup_bytes += self._exchange.take_sent()
        return found

    def fingerprint(self) -> dict[str, Any]:
        """Sizes, and a hash of some rows, the same for any division over ranks, which call it
        together. Copies that are not equal hash to nothing that was ever saved."""
        tables = []
        for index, (layer, count) in enumerate(zip(self.layers, self.rows, strict=True)):
            sample = self._sampled(index, torch.from_numpy(sampled_rows(count)))
            digest = hashlib.sha256(sample.numpy().tobytes()).hexdigest() if len(sample) else ""
            size = count * self._dim * self._table.element_size()
            tables.append(
                {
                    "name": f"layer {layer}",
                    "bytes": size,
                    "sampled_rows": digest or "copies of them differ",
                }
            )
        return {"store": "memory", "tables": tables}

    def close(self) -> None:
        self._ahead.clear()

    def _planned(self, rows: list[Tensor]) -> StepPlan:
        for number, (asked, plan) in enumerate(self._ahead):
            if same_tensors(asked, rows):
                del self._ahead[number]
                return plan
        return self._plan(rows, most=self._most)

    def _plan(self, rows: list[Tensor], *, most: int | None) -> StepPlan:
        windows = agreed_windows(
            rows, layers=self.layers, counts=self.rows, most=most, world=self._exchange.hosts
        )
        self._figures.lookup_bytes += self._exchange.take_sent()
        return StepPlan(windows, division=self._division, exchange=self._exchange)

    def _settle(self, plan: StepPlan) -> None:
        plan.settle()
        self._figures.reads += sum(window.distinct.reads for window in plan.windows)
        self._figures.distinct += sum(window.distinct.size for window in plan.windows)
        self._figures.lookup_bytes += plan.sent

    def _fetch_first(self, plan: StepPlan) -> None:
        self._figures.lookup_bytes += self._exchange.take_sent()
        plan.settle()
        plan.first = self._fetch(plan, 0)
        plan.sent += self._exchange.take_sent()

    def _fetch(self, plan: StepPlan, number: int) -> tuple[Pending, Tensor]:
        """Begin to fetch a window's values [U, head_dim], and to send others theirs."""
        me = self._exchange.rank
        values = torch.empty(plan.windows[number].distinct.size, self._dim, device=self._device)
        arriving = plan.by_owner(number, values)
        own = arriving.pop(me)
        asked = plan.asked.of(number)
        mine = asked.pop(me)
        pending = Pending()
        if asked:
            rows = self._read(torch.cat(list(asked.values())))
            parts = rows.split([len(ids) for ids in asked.values()])
            pending = self._exchange.begin(dict(zip(asked, parts, strict=True)), arriving)
        if self._table.device == self._device:
            torch.index_select(self._table, 0, mine.to(self._device), out=own)
        else:
            own.copy_(self._read(mine), non_blocking=True)
        return pending, values

    def _read(self, ids: Tensor) -> Tensor:
        """Rows of this owner by number, where the model wants them."""
        if self._table.device == self._device:
            return self._table.index_select(0, ids.to(self._device))
        staged = torch.empty(len(ids), self._dim, pin_memory=True)
        torch.index_select(self._table, 0, ids, out=staged)
        return staged.to(self._device, non_blocking=True)

    def _window(self, plan: StepPlan, number: int, values: Tensor, grads: Tensor | None) -> Window:
        window = plan.windows[number]
        inverses = [
            [inverse.to(self._device, non_blocking=True) for inverse in batch]
            for batch in window.inverses()
        ]
        ids = window.distinct.ids

        def by_layer(buffer: Tensor) -> list[Tensor]:
            if window.places is not None:
                return [buffer] * len(ids)
            return list(buffer.split([len(own) for own in ids]))

        return Window(ids, by_layer(values), inverses, [] if grads is None else by_layer(grads))

    def _mastered(self, index: int, rank: int) -> tuple[int, int]:
        return self._division.mastered(index, self._division.primary(rank))

    def _copies(self) -> list[int]:
        """The other ranks that own the same rows."""
        owners, me = self._division.owners, self._exchange.rank
        same = range(me % owners, self._exchange.size, owners)
        return [rank for rank in same if rank != me]

    def _publish_all(self, peers: Sequence[int]) -> None:
        for index, weight in enumerate(self.weight):
            first = self._owned[index][0]

            def rows(
                rank: int, index: int = index, weight: Tensor = weight, first: int = first
            ) -> Tensor:
                low, high = self._mastered(index, rank)
                return weight[low - first : high - first]

            mine = rows(self._exchange.rank)
            send = dict.fromkeys(peers, mine)
            self._exchange.begin(send, {rank: rows(rank) for rank in peers}).wait()

    def _publish_rows(self, ids: Sequence[Tensor], peers: Sequence[int]) -> None:
        numbers, before = [], 0
        for table, own, (low, high) in zip(self.primary, ids, self._owned, strict=True):
            numbers.append(own + (table.low - low + before))
            before += high - low
        changed = torch.cat(numbers).int().cpu()
        count = torch.tensor([len(changed)], dtype=torch.int32)
        counts = {rank: torch.empty_like(count) for rank in peers}
        self._exchange.begin(dict.fromkeys(peers, count), counts).wait()
        where = {rank: changed.new_empty(int(n)) for rank, n in counts.items()}
        asked = self._exchange.begin(dict.fromkeys(peers, changed), where)
        mine = self._read(changed)
        values = {rank: mine.new_empty(len(own), self._dim) for rank, own in where.items()}
        rows = self._exchange.begin(dict.fromkeys(peers, mine), values)
        asked.wait()
        rows.wait()
        for rank, own in where.items():
            place = own.long().to(self._table.device)
            self._table.index_copy_(0, place, values[rank].to(self._table.device))

    def _sampled(self, index: int, ids: Tensor) -> Tensor:
        """The bits of some rows of a layer, int32 [n, head_dim], as their primaries have them; no
        rows at all where a copy differs."""
        low, high = self._owned[index]
        first, end = self._mastered(index, self._exchange.rank)
        here = (ids >= low) & (ids < high)
        bits = torch.zeros(len(ids), self._dim, dtype=torch.int32)
        table = self.weight[index]
        bits[here] = table[(ids[here] - low).to(table.device)].cpu().view(torch.int32)
        found = bits * ((ids >= first) & (ids < end))[:, None]
        self._exchange.hosts.all_reduce_sum(found)
        differs = not torch.equal(found[here], bits[here])
        return found[:0] if self._exchange.agree(differs) else found

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._figures.waited += time.perf_counter() - begin
