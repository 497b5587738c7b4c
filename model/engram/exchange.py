"""Rows on their way between ranks, in the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel.group import Group


@dataclass(frozen=True)
class Pending:
    """Messages under way. Their tensors are kept until they have arrived."""

    works: list[dist.Work] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        """Return when all have arrived and all of ours have left."""
        for work in self.works:
            work.wait()
        self.tensors.clear()


class Exchange:
    """This rank among all, with process groups for Engram traffic alone, so that it overtakes and
    blocks nothing of the model's.

    Numbers of rows and ids travel between the hosts, from where they come, and never wait for a
    device; rows and gradients between the devices.
    """

    def __init__(self, world: Group, *, device: torch.device | None = None) -> None:
        """device: of rows and gradients, the CPU by default. All ranks together; ValueError, on all
        of them, where numbers arrive changed."""
        self.rank, self.size, self._sent = world.rank, world.size, 0
        self.hosts = Group()
        if self.size == 1:
            return
        # A device's backend may be one that knows no host memory.
        rows = dist.new_group()
        hosts = rows if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        assert isinstance(rows, dist.ProcessGroup) and isinstance(hosts, dist.ProcessGroup)
        self._rows, self.hosts = rows, Group(world.rank, world.size, hosts)
        self._probe(device or torch.device("cpu"))

    def all_to_all(self, numbers: Tensor) -> Tensor:
        """numbers int64 [size, ...], on the host: what each rank has at this rank's place."""
        out = torch.empty_like(numbers)
        dist.all_to_all_single(out, numbers, group=self.hosts.process_group)
        self._sent += numbers.nbytes * (self.size - 1) // self.size
        return out

    def take_sent(self) -> int:
        """Bytes sent to other ranks since this was last asked."""
        sent, self._sent = self._sent, 0
        return sent

    def agree(self, bad: bool) -> bool:
        """Whether any rank says so: the same answer on all."""
        return self.hosts.any(bad)

    def begin(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Pending:
        """Start to send and to receive one contiguous tensor each by rank; empty ones, of which
        both sides know, do not travel. All calls follow one order on all ranks."""
        operations = []
        for call, tensors in ((dist.irecv, receive), (dist.isend, send)):
            for rank, tensor in tensors.items():
                assert rank != self.rank and tensor.is_contiguous()
                if tensor.numel():
                    group = self.hosts.process_group if tensor.dtype == torch.int32 else self._rows
                    operations.append(dist.P2POp(call, tensor, group=group, group_peer=rank))
                    self._sent += tensor.nbytes if call is dist.isend else 0
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, [operation.tensor for operation in operations])

    def _probe(self, device: torch.device) -> None:
        """Send every rank a pattern that names both sides, of a length of its own, in each of the
        types that will travel: network plug-ins have returned shifted ids without an error."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        counts = _pattern(torch.arange(self.size), self.rank, torch.arange(self.size))
        wanted = _pattern(torch.full((self.size,), self.rank), torch.arange(self.size), self.rank)
        bad = not torch.equal(self.all_to_all(counts), wanted)
        for kind, place in ((torch.int32, torch.device("cpu")), (torch.float32, device)):

            def message(
                sender: int,
                receiver: int,
                kind: torch.dtype = kind,
                place: torch.device = place,
            ) -> Tensor:
                steps = torch.arange(3 + (5 * sender + 7 * receiver) % 11)
                return _pattern(steps, sender, receiver).to(torch.int32).view(kind).to(place)

            wanted = {rank: message(rank, self.rank) for rank in others}
            receive = {rank: torch.zeros_like(tensor) for rank, tensor in wanted.items()}
            self.begin({rank: message(self.rank, rank) for rank in others}, receive).wait()
            bad |= any(
                not torch.equal(receive[rank].view(torch.int32), wanted[rank].view(torch.int32))
                for rank in others
            )
        if self.agree(bad):
            raise ValueError(
                "numbers sent from rank to rank arrive changed, so Engram rows would be mixed up; "
                "use another network transport (a plug-in of the communication library is the "
                "usual cause: unset it, or choose its plain sockets)"
            )
        self._sent = 0


def _pattern(step: Tensor, sender: Tensor | int, receiver: Tensor | int) -> Tensor:
    """int64 numbers of which every byte counts and no two are alike."""
    sender, receiver = torch.as_tensor(sender), torch.as_tensor(receiver)
    return step * 0x9E3779B97F4A7C1 + sender * 0x1F83D9ABFB41BD7 - receiver * 0x5BE0CD19137E2F1
