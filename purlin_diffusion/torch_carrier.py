"""The carrier of backend "torch": the same exchanges over torch.distributed (gloo or NCCL).

The blocks of one call for one rank are packed into one message. Where all ranks get the same bytes they travel by an all-gather, padded to the
longest; else by an all-to-all. Partial sums go by an all-reduce. Halos are purlin's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from purlin_core.errors import ClosedError, PeerError
from purlin_core.plan import freeze_sizes
from purlin_core.spec import Sizes, Spec
from purlin_diffusion.blocks import Packing, pack, packing, unpack, window, wire_bytes
from purlin_diffusion.carrier import CarrierStats
from purlin_diffusion.stores import PrefixStore, Store

_ABORT = "abort"


class TorchCarrier:
    """One rank of a torch process group that is this carrier's own. `store` carries the text of an abort."""

    def __init__(self, group: Any, store: Store, *, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._group, self._store = group, store
        self._packings: dict[Any, Packing] = {}
        self._stats = CarrierStats()
        self._dead = ""

    def redistribute(self, x: Tensor, spec: str, *, sizes: Sizes | None = None) -> Tensor:
        """Communicator.redistribute, of copies and sums."""
        return self.exchange([x], [spec], sizes=sizes)[0]

    def exchange(self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Sizes | None = None) -> list[Tensor]:
        """Communicator.exchange, of copies and sums. Raises SpecError, ShapeError, NotBuiltError, PeerError, ClosedError."""
        parsed = [Spec.parse(spec) for spec in specs]
        how = self._packing(tensors, parsed, sizes)
        inputs = [self._sum(x) if spec.partial else x for x, spec in zip(tensors, parsed, strict=True)]
        outputs = [x.new_empty(shape) for x, shape in zip(inputs, how.out_shapes, strict=True)]
        for block in how.own:
            window(outputs[block.tensor], block.reader).copy_(
                window(inputs[block.tensor], block.source).permute(block.order)
            )
        if self.ranks > 1 and any(not spec.partial and spec.left.sharded_dim is not None for spec in parsed):
            messages = self._all_gather(how, inputs) if how.alike is not None else self._all_to_all(how, inputs)
            for blocks, message in zip(how.receives, messages, strict=True):
                unpack(blocks, message, outputs)
        self._count(how)
        return outputs

    def stats(self) -> CarrierStats:
        return self._stats

    def check(self) -> None:
        """Raise PeerError or ClosedError where there are no more calls. What NCCL meets on a GPU its own watchdog tells."""
        self._usable()

    def abort(self, reason: str) -> None:
        """Make the pending or next call of every rank raise PeerError. This carrier is dead."""
        if self._group is not None:
            self._dead = reason
            self._store.set(_ABORT, f"rank {self.rank} left: {reason}")
            self._group = None  # closes its connections, which wakes the peers

    @contextmanager
    def guard(self) -> Iterator[None]:
        """An exception inside reaches the other ranks at once."""
        try:
            yield
        except BaseException as error:
            first_line = str(error).strip().partition("\n")[0]
            self.abort(f"{type(error).__name__}: {first_line}")
            raise

    def close(self) -> None:
        """Leave the group. Later calls raise ClosedError."""
        self._group = None

    def _packing(self, tensors: Sequence[Tensor], specs: Sequence[Spec], sizes: Sizes | None) -> Packing:
        key = (tuple((x.shape, x.dtype) for x in tensors), tuple(map(str, specs)), freeze_sizes(sizes) if sizes else ())
        if (known := self._packings.get(key)) is None:
            known = self._packings[key] = packing(specs, tensors, sizes, rank=self.rank, ranks=self.ranks)
        return known

    def _all_gather(self, how: Packing, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        assert how.alike is not None
        sent = pack(how.sends[(self.rank + 1) % self.ranks], inputs, how.alike)
        got = sent.new_empty(self.ranks * how.alike)
        self._call(lambda group: group._allgather_base(got, sent))
        return list(got.view(self.ranks, how.alike))

    def _all_to_all(self, how: Packing, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        lengths_in, lengths_out = ([wire_bytes(blocks) for blocks in side] for side in (how.sends, how.receives))
        sent = torch.cat([pack(blocks, inputs, size) for blocks, size in zip(how.sends, lengths_in, strict=True)])
        got = sent.new_empty(sum(lengths_out))
        self._call(lambda group: group.alltoall_base(got, sent, lengths_out, lengths_in))
        return list(torch.split(got, lengths_out))

    def _sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._call(lambda group: group.allreduce([total]))
        return total

    def _usable(self) -> Any:
        """The group. Raises PeerError, ClosedError."""
        if self._group is None:
            raise (
                PeerError(f"exchange: this rank left: {self._dead}.")
                if self._dead
                else ClosedError("exchange: the carrier is closed.")
            )
        return self._group

    def _call(self, start: Callable[[Any], Any]) -> None:
        group = self._usable()
        try:
            start(group).wait()
        except (RuntimeError, dist.DistError) as error:
            told = self._store.get(_ABORT).decode() if self._store.check([_ABORT]) else str(error)
            raise PeerError(f"exchange over torch.distributed: {told}.") from error

    def _count(self, how: Packing) -> None:
        old = self._stats
        self._stats = CarrierStats(
            old.calls + 1, old.sent_bytes + how.sent_bytes, old.received_bytes + how.received_bytes
        )


def own_group(store: Store, *, rank: int, ranks: int, device: torch.device, timeout: float) -> TorchCarrier:
    """A carrier over a process group of its own: gloo on the CPU, NCCL on CUDA. Collective over `store`."""
    span = timedelta(seconds=timeout)
    if device.type == "cpu":
        group: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, ranks, span)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = span
        group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, ranks, options)
    return TorchCarrier(group, store, rank=rank, ranks=ranks)
