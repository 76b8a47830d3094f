"""What carries exchanges between ranks: a purlin Communicator, or torch.distributed behind the same few methods."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from purlin_core.spec import Sizes, Spec


@dataclass(frozen=True)
class CarrierStats:
    """What a rank has exchanged. Bytes are payload: neither padding nor tags. purlin_core's Stats says the same, and more."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@runtime_checkable
class Carrier(Protocol):
    """One rank's end. Calls are collective: all ranks make the same ones, in the same order. See purlin_core.communicator.Communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def redistribute(self, x: Tensor, spec: str, *, sizes: Sizes | None = None) -> Tensor: ...

    def exchange(
        self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Sizes | None = None
    ) -> list[Tensor]: ...

    def stats(self) -> Any: ...

    def check(self) -> None: ...

    def guard(self) -> AbstractContextManager[Any]: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class Around:
    """A carrier around another: whoever is derived from it says what it does otherwise."""

    def __init__(self, carrier: Carrier) -> None:
        self.rank, self.ranks = carrier.rank, carrier.ranks
        self._carrier = carrier

    def redistribute(self, x: Tensor, spec: str, *, sizes: Sizes | None = None) -> Tensor:
        return self.exchange([x], [spec], sizes=sizes)[0]

    def exchange(self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Sizes | None = None) -> list[Tensor]:
        return self._carrier.exchange(tensors, specs, sizes=sizes)

    def stats(self) -> Any:
        return self._carrier.stats()

    def check(self) -> None:
        self._carrier.check()

    def guard(self) -> AbstractContextManager[Any]:
        return self._carrier.guard()

    def abort(self, reason: str) -> None:
        self._carrier.abort(reason)

    def close(self) -> None:
        self._carrier.close()


class Alone:
    """The carrier of a world of one: nothing moves."""

    rank, ranks = 0, 1

    def redistribute(self, x: Tensor, spec: str, *, sizes: Sizes | None = None) -> Tensor:
        return Spec.parse(spec).reference([x], sizes=sizes)[0]

    def exchange(self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Sizes | None = None) -> list[Tensor]:
        return [self.redistribute(x, spec, sizes=sizes) for x, spec in zip(tensors, specs, strict=True)]

    def stats(self) -> CarrierStats:
        return CarrierStats()

    def check(self) -> None:
        """Nothing can have failed."""

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def abort(self, reason: str) -> None:
        """There is nobody to tell."""

    def close(self) -> None:
        """There is nothing to close."""
