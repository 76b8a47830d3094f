"""Ranks that disagree: MismatchError on every rank long before the timeout, naming both calls; and a new communicator on the same store works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from purlin_core import Communicator, MismatchError, PurlinError
from purlin_core.board import BOARD_BYTES, Board
from purlin_core.memory import Segment
from tests.core.worlds import REGIMES, TIMEOUT, errors_of, on_threads, world_of

RANKS = 3
LONG_BEFORE = TIMEOUT / 4  # seconds


def f(*shape: int) -> Tensor:
    return torch.ones(shape)


def moves(x: Tensor, spec: str, **arguments: Any) -> Callable[[Communicator], object]:
    return lambda comm: comm.redistribute(x.to(comm.device), spec, **arguments)


def leaves_one_out(comm: Communicator) -> None:
    comm.redistribute(f(300), "n@ -> n", tag="first")
    comm.barrier()


@dataclass(frozen=True)
class Odd:
    """Rank 1 makes another call than the rest. `theirs` and `its`: words of the two calls' texts."""

    rest: Callable[[Communicator], object]
    odd: Callable[[Communicator], object]
    theirs: str
    its: str


def gather(comm: Communicator) -> object:
    return comm.redistribute(f(300), "n@ -> n")


def in_other_order(comm: Communicator) -> None:
    comm.redistribute(f(300), "n@ -> n", tag="second")
    comm.redistribute(f(300), "n@ -> n", tag="first")


def in_order(comm: Communicator) -> None:
    comm.redistribute(f(300), "n@ -> n", tag="first")
    comm.redistribute(f(300), "n@ -> n", tag="second")


ODD = {
    "shape": Odd(gather, moves(f(301), "n@ -> n"), "n=300+300+300", "n=301+301+301"),
    "dtype of the same bytes": Odd(gather, moves(torch.ones(300, dtype=torch.int32), "n@ -> n"), "float32", "int32"),
    "op": Odd(lambda c: c.all_reduce(f(300)), lambda c: c.all_reduce(f(300), "max"), "float32 sum", "float32 max"),
    "op, scattered": Odd(moves(f(300), "+n -> n@"), moves(f(300), "+n -> n@", op="avg"), "sum", "avg"),
    "spec": Odd(moves(f(3, 300), "a@ b -> a b@"), moves(f(3, 300), "a@ b -> b@ a"), "a b@", "b@ a"),
    "kind": Odd(gather, moves(f(300), "+n -> n@"), "n@ -> n", "+n -> n@"),
    "name": Odd(lambda c: c.all_gather_into_tensor(f(900), f(300)), lambda c: c.all_reduce(f(900)), "all_gather_into_tensor", "all_reduce"),
    "order": Odd(in_order, in_other_order, "at first", "at second"),
    "tag": Odd(moves(f(300), "n@ -> n", tag="here"), moves(f(300), "n@ -> n", tag="there"), "at here", "at there"),
    "sizes": Odd(moves(f(300), "n@ -> n"), moves(f(300), "n@ -> n", sizes={"n": [299, 300, 301]}), "300+300+300", "299+300+301"),
    "a call left out": Odd(in_order, leaves_one_out, "at second", "barrier"),
    "number of tensors": Odd(gather, lambda c: c.exchange([f(300)] * 2, "n@ -> n"), "redistribute", "exchange"),
}  # fmt: skip


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ODD)
def test_another_call_on_one_rank_is_named_on_all(name: str, regime: str) -> None:
    odd = ODD[name]
    with world_of(RANKS, regime, slot_bytes=4096) as world:
        world.run(Communicator.barrier)
        began = time.monotonic()
        errors = errors_of(world, lambda comm: (odd.odd if comm.rank == 1 else odd.rest)(comm))
        assert time.monotonic() - began < LONG_BEFORE
        assert_named(errors, odd.theirs, odd.its)
        again = errors_of(world, gather)  # dead for good, and still says why
        assert all(type(error) is MismatchError for error in again), again


def assert_named(errors: list[object], *words: str) -> None:
    for rank, error in enumerate(errors):
        assert type(error) is MismatchError, (rank, error)
        assert all(word in str(error) for word in words), (rank, error)
        assert "rank 1 called" in str(error)


GRANTABLE: dict[str, Callable[[Communicator, Tensor], object]] = {
    "gather": lambda comm, out: comm.all_gather_into_tensor(out, f(300)),
    "sum": lambda comm, out: comm.all_reduce(out),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("call", GRANTABLE)
def test_a_granted_output_on_some_ranks_only_is_a_disagreement_with_its_cure(call: str, alone: bool) -> None:
    """On rank 1 alone, or on all but it."""

    def work(comm: Communicator) -> None:
        GRANTABLE[call](comm, comm.empty((900,)).fill_(1) if (comm.rank == 1) is alone else f(900))

    with world_of(RANKS, "direct") as world:
        began = time.monotonic()
        errors = errors_of(world, work)
        assert time.monotonic() - began < LONG_BEFORE
    for error in errors:
        assert type(error) is MismatchError, error
        assert "rank 1 called" in str(error) and str(error).count("into granted outputs") in (1, 2), error
        granted = {1} if alone else {0, 2}
        assert any(f"rank {rank}'s is of comm.empty()" in str(error) for rank in granted), error
        assert "Pass tensors of comm.empty() on all ranks, or on none" in str(error), error


@pytest.mark.parametrize("change", [(0, 2), (2, 1)])
def test_rows_of_an_all_to_all_that_do_not_match_are_a_disagreement(change: tuple[int, int]) -> None:
    """Rank s gives rank d one row more than d takes."""
    source, reader = change
    given = [[4] * RANKS for _ in range(RANKS)]
    given[source][reader] += 1

    def work(comm: Communicator) -> None:
        row = given[comm.rank]
        comm.all_to_all_single(f(4 * RANKS, 2), f(sum(row), 2), [4] * RANKS, row)

    with world_of(RANKS) as world:
        began = time.monotonic()
        errors = errors_of(world, work)
        assert time.monotonic() - began < LONG_BEFORE
    assert isinstance(errors[reader], MismatchError)
    assert "compare in_sizes and out_sizes" in str(errors[reader])
    assert all(error is None or isinstance(error, MismatchError) for error in errors), errors


def test_a_rank_that_has_left_since_is_not_asked_what_it_called() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.3)
        comm.redistribute(f(300), "n@ -> n" if comm.rank == 1 else "+n -> n")

    def until_then(comm: Communicator) -> None:
        try:
            work(comm)
        finally:
            if comm.rank > 0:
                comm.close()

    with world_of(RANKS, "staged", timeout=TIMEOUT) as world:
        last = str(errors_of(world, until_then)[0])
    assert "ranks disagree" in last and "has left since" in last, last
    assert "ffffff" not in last and "in_sizes" not in last, last


def test_a_later_call_tells_of_the_one_that_failed() -> None:
    def work(comm: Communicator) -> list[str]:
        said = []
        for spec in ("n@ -> n" if comm.rank == 1 else "+n -> n", "+n -> n@"):
            with pytest.raises(MismatchError) as caught:
                comm.redistribute(f(300), spec)
            said.append(str(caught.value))
        return said

    with world_of(RANKS, "staged", timeout=TIMEOUT) as world:
        for first, later in errors_of(world, work):
            assert first == later and 'rank 1 called redistribute "n@ -> n"' in later, (first, later)


def test_the_texts_of_many_calls_are_still_known() -> None:
    """The board keeps hundreds of texts; a disagreement at the sixth hundred names both."""

    def work(comm: Communicator) -> None:
        for n in range(600):
            comm.redistribute(torch.zeros(n, dtype=torch.uint8), "n@ -> n")
        comm.redistribute(torch.zeros(2000 + comm.rank // 2, dtype=torch.uint8), "n@ -> n")

    with world_of(RANKS) as world:
        for error in errors_of(world, work):
            assert type(error) is MismatchError
            assert "n=2000+2000+2000" in str(error) and "n=2001+2001+2001" in str(error), error


def test_a_new_communicator_on_the_same_store_works_after_a_disagreement() -> None:
    store = HashStore()

    def work(rank: int) -> Tensor:
        dead = Communicator(store, rank=rank, ranks=RANKS, timeout=TIMEOUT)
        with pytest.raises(PurlinError):
            dead.redistribute(f(300 + rank % 2), "n@ -> n")
        with Communicator(store, rank=rank, ranks=RANKS, timeout=TIMEOUT) as comm:
            out = comm.redistribute(torch.full((2,), float(rank)), "n@ -> n")
            comm.barrier()
        with pytest.raises(MismatchError):
            dead.check()
        dead.close()
        return out

    for out in on_threads(RANKS, work):
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_a_text_is_never_shown_for_another_call() -> None:
    """Signatures that share a place on the board replace each other; then there is no text rather than a wrong one."""
    board = Board(Segment.private(BOARD_BYTES))
    board.note(0x000123, "the first")
    board.note(0xFFF123, "the second")
    board.note(0x000124, "x" * 5000)
    assert board.text(0x000123) is None and board.text(0xFFF123) == "the second"
    assert board.text(0x000124) == "x" * len(board.text(0x000124) or "") != ""
    assert board.text(0x000125) is None and board.reason == ""
    board.reason = "out of memory: \u00fc" * 1000
    assert board.reason.startswith("out of memory: \u00fcout") and board.text(0xFFF123) == "the second"
