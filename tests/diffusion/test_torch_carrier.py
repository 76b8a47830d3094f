"""The torch carrier moves what the spec's reference says, bitwise, ragged and empty shards included; an abort reaches the peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from purlin_core import ClosedError, PeerError, ShapeError, Spec
from purlin_diffusion import NotBuiltError
from purlin_diffusion.torch_carrier import TorchCarrier, own_group
from purlin_diffusion.workers import on_threads

WORLDS = (1, 2, 3, 4)


def carriers_of(ranks: int) -> list[TorchCarrier]:
    store = dist.HashStore()
    return on_threads(
        ranks, lambda rank: own_group(store, rank=rank, ranks=ranks, device=torch.device("cpu"), timeout=20)
    )


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[TorchCarrier]]:
    return {ranks: carriers_of(ranks) for ranks in WORLDS}


def ragged(ranks: int) -> list[int]:
    return [(3 * rank) % 4 for rank in range(ranks)]


CASES: list[tuple[str, Callable[[int], Mapping[str, Any]], Callable[[int, int], tuple[int, ...]]]] = [
    ("n@ -> n", lambda p: {"n": ragged(p)}, lambda r, p: (ragged(p)[r],)),
    ("n@ -> n", lambda p: {"n": [5] + [0] * (p - 1)}, lambda r, p: (5 if r == 0 else 0,)),
    (
        "b (t@ i@) h d -> b (t i) h d",
        lambda p: {"t": ragged(p), "i": [2] * p},
        lambda r, p: (2, ragged(p)[r] + 2, 3, 4),
    ),
    (
        "b (t@ i@) h d -> b (t i) h@ d",
        lambda p: {"t": ragged(p), "i": [2] * p, "h": [2] + [0] * (p - 1)},
        lambda r, p: (2, ragged(p)[r] + 2, 2, 4),
    ),
    (
        "b h (t@ w) d -> b (t w) h@ d",
        lambda p: {"t": ragged(p), "w": 3, "h": [1] * p},
        lambda r, p: (2, p, ragged(p)[r] + 3, 4),
    ),
    (
        "b (t i) h@ d -> b (t@ i) h d",
        lambda p: {"t": ragged(p), "i": 4, "h": [2] * p},
        lambda r, p: (2, sum(ragged(p)) + 4, 2, 3),
    ),
    ("s@ h -> h s@", lambda p: {"s": ragged(p)}, lambda r, p: (ragged(p)[r], 3)),
    ("a b -> b a", lambda p: {}, lambda r, p: (2, 3)),
    ("+a b -> a@ b", lambda p: {"a": ragged(p)}, lambda r, p: (sum(ragged(p)), 2)),
    ("+a b -> b a", lambda p: {}, lambda r, p: (3, 2)),
]


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for case in range(len(CASES))
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64)
        if not (CASES[case][0].startswith("+") and dtype is torch.bool)  # torch sums no bools
    ],
)
def test_it_moves_what_the_reference_says(
    worlds: dict[int, list[TorchCarrier]], case: int, ranks: int, dtype: torch.dtype
) -> None:
    spec, sizes, shape = CASES[case]
    inputs = [
        torch.randint(-9, 9, shape(rank, ranks), generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(ranks)
    ]
    wanted = Spec.parse(spec).reference(inputs, sizes=sizes(ranks))
    got = on_threads(ranks, lambda rank: worlds[ranks][rank].redistribute(inputs[rank], spec, sizes=sizes(ranks)))
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_list_goes_in_one_call_of_counted_bytes(worlds: dict[int, list[TorchCarrier]], ranks: int) -> None:
    inputs = [[torch.full((2, ragged(ranks)[rank], 3), float(rank)), torch.arange(5) + rank] for rank in range(ranks)]
    specs = ["b t@ c -> b t c", "n@ -> n"]

    def rank_of(rank: int) -> tuple[list[Tensor], int, int]:
        carrier = worlds[ranks][rank]
        before = carrier.stats()
        outputs = carrier.exchange(inputs[rank], specs, sizes={"t": ragged(ranks), "n": [5] * ranks})
        after = carrier.stats()
        return outputs, after.calls - before.calls, after.sent_bytes - before.sent_bytes

    for rank, (outputs, calls, sent) in enumerate(on_threads(ranks, rank_of)):
        for i, spec in enumerate(specs):
            every = [tensors[i] for tensors in inputs]
            sizes = {"t": ragged(ranks)} if i == 0 else {"n": [5] * ranks}
            assert torch.equal(outputs[i], Spec.parse(spec).reference(every, sizes=sizes)[rank])
        assert (calls, sent) == (1, (ranks - 1) * (2 * ragged(ranks)[rank] * 3 * 4 + 5 * 8))


def test_halos_and_misfits_are_named(worlds: dict[int, list[TorchCarrier]]) -> None:
    carrier = worlds[2][0]
    with pytest.raises(NotBuiltError, match="no halos"):
        carrier.redistribute(torch.zeros(4), "y@ -> y@~1")
    with pytest.raises(ShapeError):
        carrier.redistribute(torch.zeros(4), "y@ -> y", sizes={"y": [3, 3]})


@pytest.mark.parametrize("guarded", [False, True])
def test_an_abort_reaches_the_peers_and_a_new_group_works(guarded: bool) -> None:
    carriers = carriers_of(3)

    def rank_of(rank: int) -> Any:
        began = time.monotonic()
        try:
            if rank == 1 and not guarded:
                carriers[rank].abort("RuntimeError: out of glue")
            with carriers[rank].guard():
                if rank == 1 and guarded:
                    raise RuntimeError("out of glue")
                carriers[rank].redistribute(torch.zeros(2), "n@ -> n")
        except (PeerError, RuntimeError) as error:
            return error, time.monotonic() - began
        return None

    for rank, (error, seconds) in enumerate(on_threads(3, rank_of)):
        assert "out of glue" in str(error) and seconds < 5
        if rank != 1:
            assert isinstance(error, PeerError) and "rank 1 left: RuntimeError: out of glue" in str(error)
    again = carriers_of(3)
    assert on_threads(3, lambda rank: again[rank].redistribute(torch.ones(1), "+n -> n").item()) == [3.0] * 3


def test_a_closed_carrier_says_so() -> None:
    (carrier,) = carriers_of(1)
    carrier.check()
    carrier.close()
    with pytest.raises(ClosedError):
        carrier.check()
    with pytest.raises(ClosedError):
        carrier.redistribute(torch.zeros(2), "+n -> n")
