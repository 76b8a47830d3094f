"""How torch's symmetric memory meets, as we let it: whatever it has counted, in bounded time, without a trace in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from purlin_core.cuda_memory import _Steps
from purlin_core.settings import plain_rendezvous
from tests.core.worlds import on_threads


def test_ranks_that_count_rendezvous_differently_still_meet() -> None:
    """torch counts all rendezvous of a process in its keys; rank 1 took part in 40 more."""
    shared = HashStore()

    def meet(rank: int) -> list[bytes]:
        steps = _Steps(shared, 5.0)  # torch's side of it works as long as this one lives
        store = PrefixStore("beneath", steps)
        found = []
        for turn in range(3):
            at = 40 * rank + turn
            store.set(f"Memory/{at}/{rank}", bytes([turn, rank, 255]))
            found += store.multi_get([f"Memory/{at}/{r}" for r in range(2)])
        store.barrier(f"Memory/{40 * rank + 3}", 2)
        return found

    wanted = [bytes([turn, rank, 255]) for turn in range(3) for rank in range(2)]
    assert on_threads(2, meet) == [wanted, wanted]


def test_a_rendezvous_ends_in_time() -> None:
    steps = _Steps(HashStore(), 0.1)
    store = PrefixStore("beneath", steps)
    with pytest.raises(Exception, match=r"[Tt]imeout"):
        store.multi_get(["Memory/0/1"])
    with pytest.raises(Exception, match=r"[Tt]imeout"):
        store.wait(["Memory/0/1"], timedelta(seconds=0.1))


@pytest.mark.parametrize("before", [None, "0"])
def test_a_rendezvous_leaves_the_environment_as_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    def inside() -> Iterator[str | None]:
        with plain_rendezvous():
            yield os.environ.get(name)

    assert list(inside()) == ["1"] and os.environ.get(name) == before
