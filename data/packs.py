"""Packs of one or several sources, found by their global index; small enough to send anywhere."""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import count as counting
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.cache.prepared import PreparedSet
from data.errors import DataError
from data.mixture import Mixture
from data.order import NoPackError, SourceOrder
from data.plan.stored import StoredPlans
from data.plan.window import WindowPlan

if TYPE_CHECKING:
    from data.engram import RowHasher
    from model.config import VisionConfig

POLL_SECONDS = 0.5
SILENT_SECONDS = 10.0


class Place(NamedTuple):
    """Where a pack is: number of its source, window, number in the window's plan."""

    source: int
    window: int
    pack: int


class MissingWindowError(Exception):
    """A window that is still to come was asked for by one who does not wait. args: its number."""


@dataclass(frozen=True)
class PackSource:
    """The packs of one source. Plain data: a path and settings.

    name: of its settings, for messages. weight: its part of a mixture. epochs: the most times
    that its packs may be used; None = any. patient: wait for windows that are still to come;
    otherwise asking for one raises MissingWindowError.
    """

    name: str
    plans: StoredPlans
    weight: float = 1.0
    epochs: int | None = None
    patient: bool = True

    @property
    def streaming(self) -> bool:
        """Whether windows may still be arriving; then the first epoch takes them as they do."""
        return self.plans.settings.streaming

    @property
    def total(self) -> int | None:
        """Windows of the source; None while some may be missing."""
        prepared = self.plans.prepared
        return prepared.windows if prepared.complete else None

    def packs(self, window: int) -> int | None:
        """Packs for training in a window, waited for and planned if need be; None past the last."""
        return self.plans.training_packs(window) if self._wait_for(window) else None

    def plan_beginning(self, *, seed: int, number: int) -> None:
        """Plan the windows that a run needs at once: of its first step, to evaluate on, and all to
        see whether limited epochs suffice.

        DataError when any window that is there has a document that cannot be packed.
        """
        for window in range(self.plans.prepared.windows):
            self.plans.require_places(window)
            if self.epochs is not None and not self.streaming:
                self.packs(window)
        order = SourceOrder(self, seed=seed, source=number, arrival=self.streaming)
        with suppress(NoPackError):
            order.locate(0)
        if self.plans.settings.holdout:
            self.held_out(0)

    def held_out(self, window: int) -> range | None:
        """Numbers of the held-out packs of a window; None past the last that may have any."""
        if (self.streaming and window > 0) or not self._wait_for(window):
            return None
        plan = self.plans.plan(window)
        return range(plan.training, len(plan))

    def describe(self, window: int) -> str:
        """A window in words."""
        return f"window {window} of {self.name} ({self.plans.prepared.window_folder(window)})"

    def _wait_for(self, window: int) -> bool:
        """Whether there is such a window, once that is known. Raises what ended its writer."""
        prepared, began, told = self.plans.prepared, time.monotonic(), False
        while not prepared.window_folder(window).is_dir():
            if prepared.complete:
                return window < prepared.windows
            if not self.patient:
                raise MissingWindowError(window)
            prepared.require_growing()
            if not told and time.monotonic() - began > SILENT_SECONDS:
                print(f"Waiting for {self.describe(window)}: it is still being prepared.")
                told = True
            time.sleep(POLL_SECONDS)
        return True


@dataclass(frozen=True, eq=False)
class PackedSet:
    """Packs that can be turned into batches.

    Those for training are an endless sequence, a function of seed and index; the held-out ones
    (held_out=True) are finitely many in a fixed order. hasher: None for a model without Engram;
    vision: None for one without images. Pickles to a few paths, besides the hasher's token map.
    """

    sources: tuple[PackSource, ...]
    pack_length: int
    pad_token_id: int
    seed: int
    held_out: bool = False
    hasher: RowHasher | None = None
    vision: VisionConfig | None = None

    def place(self, index: int) -> Place:
        """Where the pack with this global index is. IndexError past the last held-out one."""
        if self.held_out:
            return self._held_out_places(index + 1)[index]
        source, number = self._mixture.locate(index)
        epoch, window, pack = self._orders[source].locate(number)
        limit = self.sources[source].epochs
        if limit is not None and epoch >= limit:
            raise DataError(
                f"{self.sources[source].name} is used up: its packs have been gone through "
                f"{limit} time(s), as often as {self.sources[source].name}.epochs allows; raise "
                "that, lower its weight, or train fewer steps"
            )
        return Place(source, window, pack)

    def available(self, count: int) -> int:
        """`count`, or how many held-out packs there are if that is fewer."""
        assert self.held_out, "packs for training have no end"
        return min(count, len(self._held_out_places(count)))

    def problems(self, packs: int) -> list[str]:
        """Why the first `packs` packs for training cannot all be had, each with its fix.

        Counts the packs of sources whose epochs are limited; of a streaming one nobody can.
        """
        found = [
            f"{source.name} has no document to train on: all of them are longer than a pack or "
            "held out; give more, raise data.pack_length, or lower data.holdout"
            for source in self.sources
            if not _any(source)
        ]
        for source, wanted in zip(self.sources, self._mixture.used(packs), strict=True):
            if source.epochs is None or source.streaming:
                continue
            present = sum(source.packs(window) or 0 for window in range(source.total or 0))
            if wanted > present * source.epochs:
                found.append(
                    f"{source.name}.epochs={source.epochs} allows {present * source.epochs:,} of "
                    f"its packs, but {packs:,} packs of training need {wanted:,}; raise it (or "
                    f"null), lower {source.name}.weight, or train fewer steps"
                )
        return found

    def plan_ahead(self, index: int) -> None:
        """Plan the window that comes after that of `place(index)`, if it is there and unplanned."""
        source, number = self._mixture.locate(index)
        following = self._orders[source].next_window(number)
        plans = self.sources[source].plans
        if following is not None and plans.prepared.window_folder(following).is_dir():
            plans.plan_ahead(following)

    def plan_of(self, place: Place) -> WindowPlan:
        """The plan in which a pack stands."""
        return self.sources[place.source].plans.plan(place.window)

    def pieces(self, place: Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(starts, lengths, columns) of a pack's pieces, as in its plan."""
        plan = self.plan_of(place)
        here = slice(int(plan.pack_offsets[place.pack]), int(plan.pack_offsets[place.pack + 1]))
        return plan.starts[here], plan.lengths[here], plan.columns[here]

    def tokens(self, place: Place) -> np.ndarray:
        """All tokens of a pack's window, which its pieces point into."""
        return _tokens(self.prepared(place), place.window)

    def labelled(self, place: Place) -> np.ndarray | None:
        """Which of the window's tokens may be predicted; None when all may."""
        return _labelled(self.prepared(place), place.window)

    def prepared(self, place: Place) -> PreparedSet:
        """The documents among which a pack's are."""
        return self.sources[place.source].plans.prepared

    def describe(self, index: int) -> str:
        """The pack for training with this index, in words; waits for nothing."""
        number, before = self._mixture.locate(index)
        source = replace(self.sources[number], patient=False)
        order = SourceOrder(source, seed=self.seed, source=number, arrival=source.streaming)
        try:
            _, window, pack = order.locate(before)
        except MissingWindowError as missing:
            return source.describe(missing.args[0])
        return f"pack {pack} in {source.describe(window)}"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what is cached

    @functools.cached_property
    def _mixture(self) -> Mixture:
        return Mixture.of(tuple(source.weight for source in self.sources))

    @functools.cached_property
    def _orders(self) -> list[SourceOrder]:
        return [
            SourceOrder(source, seed=self.seed, source=number, arrival=source.streaming)
            for number, source in enumerate(self.sources)
        ]

    @functools.cached_property
    def _held_out(self) -> list[Place]:
        return []

    @functools.cached_property
    def _held_out_ahead(self) -> Iterator[Place]:
        return self._walk_held_out()

    def _held_out_places(self, count: int) -> list[Place]:
        """The first `count` held-out packs, or all."""
        while len(self._held_out) < count:
            place = next(self._held_out_ahead, None)
            if place is None:
                break
            self._held_out.append(place)
        return self._held_out

    def _walk_held_out(self) -> Iterator[Place]:
        """Window by window; sources of a mixture take turns by their weights."""
        walks = [self._walk_source(number) for number in range(len(self.sources))]
        return (place for _, place in heapq.merge(*walks))

    def _walk_source(self, number: int) -> Iterator[tuple[float, Place]]:
        source, done = self.sources[number], 0
        for window in counting():
            packs = source.held_out(window)
            if packs is None:
                return
            for pack in packs:
                done += 1
                yield done / source.weight, Place(number, window, pack)


def _any(source: PackSource) -> bool:
    packs = (source.packs(window) for window in counting())
    return any(takewhile(lambda count: count is not None, packs))


@functools.lru_cache(maxsize=256)  # mapping a file anew for every pack would cost more than reading
def _tokens(prepared: PreparedSet, window: int) -> np.ndarray:
    return np.asarray(prepared.tokens(window))


@functools.lru_cache(maxsize=256)
def _labelled(prepared: PreparedSet, window: int) -> np.ndarray | None:
    mask = prepared.labelled(window)
    return None if mask is None else np.asarray(mask)
