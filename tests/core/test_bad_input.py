"""Bad input that every rank passes alike: the right named error on each rank, nothing is sent, and the next call works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from purlin_core import (
    AliasError,
    ArgumentTypeError,
    ClosedError,
    Communicator,
    DeviceError,
    DtypeError,
    LocalWorld,
    PeerError,
    PurlinError,
    SetupError,
    ShapeError,
    SpecError,
    StallError,
)
from purlin_core.errors import in_words
from tests.core.worlds import TIMEOUT, errors_of, same_bits, world_of

RANKS = 3


@dataclass(frozen=True)
class Bad:
    error: type[PurlinError]
    words: tuple[str, ...]  # what the message must say: the call, the argument, what came, or the cure
    call: Callable[[Communicator], object]


def f(*shape: int) -> Tensor:
    return torch.ones(shape)


def freed(n: int) -> Tensor:
    """As a sharding library leaves weights that it has given away."""
    x = torch.ones(n)
    x.untyped_storage().resize_(0)
    return x


def moves(x: Tensor, spec: str, **arguments: Any) -> Callable[[Communicator], object]:
    """On the communicator's device, but for what is on none."""

    def call(comm: Communicator) -> object:
        placed = {name: _on(comm, value) for name, value in arguments.items()}
        return comm.redistribute(_on(comm, x), spec, **placed)

    return call


def _on(comm: Communicator, x: Any) -> Any:
    return x.to(comm.device) if isinstance(x, Tensor) and not x.is_meta else x


def overlapping(comm: Communicator) -> None:
    x = f(12)
    comm.all_gather_into_tensor(x, x[2:6])


def another_shard(comm: Communicator) -> None:
    x, mine = f(12), (comm.rank + 1) % RANKS * 4
    comm.all_gather_into_tensor(x, x[mine : mine + 4])


def outputs_that_meet(comm: Communicator) -> None:
    out = f(18)
    comm.exchange([f(4), f(4)], "n@ -> n", out=[out[:12], out[6:]])


def onto_itself_of_a_copy(comm: Communicator) -> None:
    x = f(6, 6)
    comm.redistribute(x, "a b -> b a", out=x)


BAD = {
    "meta input": Bad(DeviceError, ("all_gather_into_tensor: `x`", "meta"), lambda c: c.all_gather_into_tensor(f(12), f(4).to("meta"))),
    "meta output": Bad(DeviceError, ("`out`", "meta"), moves(f(4), "n@ -> n", out=f(12).to("meta"))),
    "complex sum": Bad(DtypeError, ("all_reduce: `x`", "complex64", "Cast"), lambda c: c.all_reduce(f(4).to(torch.complex64))),
    "bool sum": Bad(DtypeError, ("bool", "Cast"), moves(f(3) > 0, "+n -> n@")),
    "float8 sum": Bad(DtypeError, ("float8_e4m3fn",), lambda c: c.all_reduce(f(4).to(torch.float8_e4m3fn))),
    "mean of ints": Bad(DtypeError, ("avg", "int32"), lambda c: c.all_reduce(torch.ones(4, dtype=torch.int32), "avg")),
    "out of another dtype": Bad(DtypeError, ("`out`", "float32", "float64"), moves(f(4), "n@ -> n", out=f(12).double())),
    "sum of two dtypes": Bad(DtypeError, ("float32 and float64",), lambda c: c.exchange([f(3), f(3).double()], "+n -> n")),
    "requires grad": Bad(DtypeError, ("requires grad", "no_grad"), lambda c: c.all_reduce(f(4).requires_grad_())),
    "out requires grad": Bad(DtypeError, ("`out` requires grad",), lambda c: c.all_gather_into_tensor(f(12).requires_grad_(), f(4))),
    "lazy conjugate": Bad(DtypeError, ("resolve_conj",), lambda c: c.redistribute(f(4).to(torch.complex64).conj(), "n@ -> n")),
    "freed storage": Bad(ArgumentTypeError, ("all_reduce", "memory of their own"), lambda c: c.all_reduce(freed(4))),
    "freed output": Bad(ArgumentTypeError, ("memory of their own",), lambda c: c.redistribute(f(4), "n@ -> n", out=freed(12))),
    "sparse": Bad(ShapeError, ("sparse", "to_dense"), moves(f(4).to_sparse(), "n@ -> n")),
    "sparse rows": Bad(ShapeError, ("sparse_csr", "to_dense"), lambda c: c.redistribute(f(4, 4).to_sparse_csr(), "a@ b -> a b")),
    "sparse output": Bad(ShapeError, ("`out`", "sparse"), moves(f(4), "n@ -> n", out=f(12).to_sparse())),
    "rows not divisible": Bad(ShapeError, ("reduce_scatter_tensor", "by 3 ranks", "7 rows"), lambda c: c.reduce_scatter_tensor(f(2), f(7))),
    "all-to-all not divisible": Bad(ShapeError, ("all_to_all_single", "3 ranks", "7 rows", "in_sizes"), lambda c: c.all_to_all_single(f(7), f(7))),
    "out too small": Bad(ShapeError, ("`out` needs shape (12,)", "(11,)"), lambda c: c.all_gather_into_tensor(f(11), f(4))),
    "too few dims": Bad(ShapeError, ("`x` needs 2 dims",), moves(f(4), "s@ h -> s h")),
    "scalar": Bad(ShapeError, ("scalar", "view(1)"), lambda c: c.reduce_scatter_tensor(f(1), torch.tensor(1.0))),
    "rows of other width": Bad(ShapeError, ("dim 0 only",), lambda c: c.all_to_all_single(f(6, 2), f(6, 3), [2] * 3, [2] * 3)),
    "no arrow": Bad(SpecError, ("two sides",), moves(f(4), "n@")),
    "unknown dim": Bad(SpecError, ("`m` is missing",), moves(f(4), "n@ -> n m")),
    "halo of sums": Bad(SpecError, ("halo of partial",), moves(f(6), "+n -> n@~1")),
    "copy beside a sum": Bad(SpecError, ("Make a call of each kind",), lambda c: c.exchange([f(3), f(3)], ["n@ -> n", "+n -> n"])),
    "no such op": Bad(SpecError, ("all_reduce: `op`", "sum, avg, max, min", "product"), lambda c: c.all_reduce(f(4), "product")),  # type: ignore[arg-type]
    "no such op of a copy": Bad(SpecError, ("`op`", "product"), moves(f(4), "n@ -> n", op="product")),
    "sizes of two ranks": Bad(ShapeError, ("sizes['n']", "3 ranks", "[4, 4]"), moves(f(4), "n@ -> n", sizes={"n": [4, 4]})),
    "negative size": Bad(ShapeError, ("0 or more",), moves(f(4), "n@ -> n", sizes={"n": [4, -1, 4]})),
    "sizes of another tensor": Bad(ShapeError, ("`x` needs", "rows in dim 0", "4"), moves(f(4), "n@ -> n", sizes={"n": [5, 5, 5]})),
    "sizes of no name": Bad(ShapeError, ("'m'", "sizes"), moves(f(4), "n@ -> n", sizes={"m": [4, 4, 4]})),
    "in_sizes do not add up": Bad(ShapeError, ("`in_sizes`", "add up to 6"), lambda c: c.all_to_all_single(f(6), f(6), [2] * 3, [2, 2, 3])),
    "gives itself more than it takes": Bad(ShapeError, ("give itself",), lambda c: c.all_to_all_single(f(6), f(9), [2] * 3, [3] * 3)),
    "halo of no dim": Bad(ShapeError, ("halo", "dim=2"), lambda c: c.halo(f(3), 2, 1)),
    "negative halo": Bad(ShapeError, ("halo", "rows=(-1, 0)"), lambda c: c.halo(f(3), 0, (-1, 0))),
    "no tensors": Bad(ShapeError, ("exchange", "0 tensors"), lambda c: c.exchange([], "n@ -> n")),
    "no tensors but an output": Bad(ShapeError, ("exchange",), lambda c: c.exchange([], "n@ -> n", out=[f(3)])),
    "too many tensors": Bad(ShapeError, ("1 to 16 tensors", "17 tensors"), lambda c: c.exchange([f(1)] * 17, "n@ -> n")),
    "one tensor": Bad(ArgumentTypeError, ("exchange", "one tensor", "Pass [x]"), lambda c: c.exchange(f(4), "n@ -> n")),
    "rows of a number": Bad(ArgumentTypeError, ("`sizes`", "a list of integers"), lambda c: c.all_gather_into_tensor(f(12), f(4), sizes=4)),
    "a spec too few": Bad(ShapeError, ("a spec for each", "2 tensors, 1 specs"), lambda c: c.exchange([f(1)] * 2, ["n@ -> n"])),
    "an output too few": Bad(ShapeError, ("`out`", "2 inputs; got 1"), lambda c: c.exchange([f(1)] * 2, "n@ -> n", out=[f(3)])),
    "overlap": Bad(AliasError, ("`out`", "shares with `x`", "in place are"), overlapping),
    "another's shard": Bad(AliasError, ("`out`", "`x`"), another_shard),
    "two outputs meet": Bad(AliasError, ("out[1]", "out[0]"), outputs_that_meet),
    "copy onto itself": Bad(AliasError, ("`out`", "`x`"), onto_itself_of_a_copy),
    "expanded output": Bad(AliasError, ("memory of its own for each element",), lambda c: c.redistribute(f(4), "n@ -> n", out=f(1).expand(12))),
    "expanded sum in place": Bad(AliasError, ("memory of its own for each element",), lambda c: c.all_reduce(f(1).expand(4))),
    "no blocks": Bad(ShapeError, ("budget", "blocks", "got 0"), lambda c: c.budget(0).__enter__()),
    "heap too small": Bad(ShapeError, ("empty", "heap_bytes", "reserve()"), lambda c: c.empty((1 << 20,))),
}  # fmt: skip


@pytest.fixture(scope="module")
def world() -> LocalWorld:
    with world_of(RANKS, heap_bytes=1 << 12) as made:
        yield made  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_on_every_rank_and_the_next_call_works(name: str, world: LocalWorld) -> None:
    assert_named(name, world)


def assert_named(name: str, world: LocalWorld) -> None:
    bad, before = BAD[name], [comm.stats() for comm in world.communicators]
    for error in errors_of(world, on_its_device(bad.call)):
        assert type(error) is bad.error, error
        assert all(word in str(error) for word in bad.words), error
    assert [comm.stats() for comm in world.communicators] == before

    shards = [torch.arange(4.0) + 10 * rank for rank in range(RANKS)]
    for out in world.run(lambda comm: comm.redistribute(shards[comm.rank].to(comm.device), "n@ -> n")):
        assert same_bits(out.cpu(), torch.cat(shards))
    world.run(Communicator.check)


ALONE = sorted(set(BAD) - {"no blocks", "heap too small"})  # those are no calls


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_alone_refuses_is_told_by_those_who_wait_for_it(name: str) -> None:
    errors = errors_where_rank_1(BAD[name].call, first=Communicator.barrier)
    for error in (errors[0], errors[2]):
        assert str(error).endswith(told(errors[1], entered=1))


def test_so_it_is_in_a_communicator_that_has_another_heap() -> None:
    errors = errors_where_rank_1(BAD["scalar"].call, first=lambda comm: (comm.barrier(), comm.reserve(64)))
    for error in (errors[0], errors[2]):
        assert str(error).endswith(told(errors[1], entered=0))


def test_what_a_rank_refused_before_it_made_the_call_is_not_told() -> None:
    def first(comm: Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(ShapeError):
                BAD["scalar"].call(comm)
        comm.barrier()

    errors = errors_where_rank_1(lambda comm: None, first=first)
    assert all("rank 1 has not entered call #2." in str(error) for error in (errors[0], errors[2]))


def test_what_all_have_refused_alike_holds_nobody_up() -> None:
    def first(comm: Communicator) -> None:
        comm.barrier()
        with pytest.raises(ShapeError):
            BAD["scalar"].call(comm)

    errors = errors_where_rank_1(lambda comm: None, first=first)
    assert all(str(error).endswith("rank 1 has not entered call #2.") for error in (errors[0], errors[2]))


def test_a_plan_that_is_refused_is_no_call() -> None:
    def first(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(SpecError):
                comm.plan([f(4)], "n@ -> n m")

    errors = errors_where_rank_1(lambda comm: None, first=first)
    assert all(str(error).endswith("rank 1 has not entered call #2.") for error in (errors[0], errors[2]))


def told(refusal: BaseException, *, entered: int) -> str:
    why = in_words(refusal).rstrip(".")
    return f"rank 1 has not entered call #{entered + 1}, and since it entered #{entered} has refused a call: {why}."


def errors_where_rank_1(
    refuses: Callable[[Communicator], object],
    *,
    first: Callable[[Communicator], object],
    meet: Callable[[Communicator], object] = Communicator.barrier,
    ranks: int = RANKS,
    **world: Any,
) -> list[Any]:
    """After `first`, which all make, the others meet, once rank 1 has done that: they stall."""
    done = threading.Event()

    def work(comm: Communicator) -> None:
        first(comm)
        if comm.rank != 1:
            assert done.wait(TIMEOUT)
            meet(comm)
        try:
            refuses(comm)
        finally:
            done.set()

    with world_of(ranks, **{"timeout": 0.1, **world}) as made:
        errors = errors_of(made, work)
    assert all(type(error) is StallError for rank, error in enumerate(errors) if rank != 1), errors
    return errors


def on_its_device(call: Callable[[Communicator], object]) -> Callable[[Communicator], object]:
    """What `call` makes lies on the communicator's device."""

    def made_there(comm: Communicator) -> object:
        with torch.device(comm.device):
            return call(comm)

    return made_there


def test_what_requires_grad_may_pass_under_no_grad_and_inference_tensors_always(world: LocalWorld) -> None:
    def work(comm: Communicator) -> None:
        with torch.no_grad():
            assert comm.redistribute(f(4).requires_grad_(), "n@ -> n").sum() == 12
        with torch.inference_mode():
            x = f(4)
            assert comm.redistribute(x, "n@ -> n").sum() == 12
        assert comm.redistribute(x, "n@ -> n").sum() == 12

    world.run(work)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda x: x.to("meta"), DeviceError),
        (lambda x: x.requires_grad_(), DtypeError),
        (lambda x: x.to(torch.complex64), DtypeError),
        (lambda x: x.to_sparse(), ShapeError),
    ],
)
def test_a_good_call_does_not_open_the_door_for_a_bad_one_of_the_same_shapes(
    spoil: Callable[[Tensor], Tensor], error: type[PurlinError], world: LocalWorld
) -> None:
    """Plans are kept by all that matters of a tensor."""

    def work(comm: Communicator) -> None:
        for _ in range(2):
            comm.all_reduce(f(6))
            comm.redistribute(f(6), "+n -> n")
            with pytest.raises(error):
                comm.all_reduce(spoil(f(6)))
            with pytest.raises(error):
                comm.redistribute(spoil(f(6)), "+n -> n")

    world.run(work)


CALLS: dict[str, Callable[[Communicator], object]] = {
    "redistribute": moves(f(4), "n@ -> n"),
    "all_reduce": lambda c: c.all_reduce(f(4)),
    "all_to_all_single": lambda c: c.all_to_all_single(f(4), f(4), [2, 2], [2, 2]),
    "halo": lambda c: c.halo(f(4), 0, 1),
    "barrier": Communicator.barrier,
    "empty": lambda c: c.empty((1,)),
    "reserve": lambda c: c.reserve(64),
    "plan": lambda c: c.plan([torch.ones(2)], "a@ -> a"),
    "check": Communicator.check,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("used_before", [True, False])
def test_a_closed_communicator_says_so(name: str, used_before: bool) -> None:
    with world_of(2, heap_bytes=1 << 12) as world:
        if used_before:
            world.run(CALLS[name])
        world.close()
        world.close()
        for error in errors_of(world, CALLS[name]):
            assert type(error) is ClosedError and name in str(error) and "Make a new one" in str(error)
        assert all(comm.stats().calls >= 0 for comm in world.communicators)


def test_a_lot_of_strided_dims_is_refused(world: LocalWorld) -> None:
    x = torch.zeros([4] * 7)[tuple(slice(None, None, 2) for _ in range(7))]
    for error in errors_of(world, lambda comm: comm.redistribute(x, "a@ b c d e f g -> a b c d e f g")):
        assert isinstance(error, ShapeError) and "at most 4 strided dims" in str(error)


WRONG_TYPES = {
    "x as a list": lambda c: c.redistribute([1, 2], "a@ -> a"),
    "x as None": lambda c: c.all_reduce(None),
    "spec as a number": lambda c: c.redistribute(torch.ones(2), 5),
    "sizes as a list": lambda c: c.redistribute(torch.ones(2), "a@ -> a", sizes=[2, 2]),
    "sizes of None": lambda c: c.redistribute(torch.ones(2), "a@ -> a", sizes={"a": None}),
    "sizes of floats": lambda c: c.redistribute(torch.ones(2), "a@ -> a", sizes={"a": [2.0, 2.0]}),
    "one tensor for a list": lambda c: c.exchange(torch.ones(2, 2), "a@ -> a"),
    "a halo of floats": lambda c: c.halo(torch.ones(2, 2), 0, 1.5),
    "a halo of None": lambda c: c.halo(None, 0, 1),
    "op as a list": lambda c: c.all_reduce(torch.ones(2), op=["sum"]),
    "tag as a list": lambda c: c.exchange([torch.ones(2)], "a@ -> a", tag=[3]),
    "shares as a number": lambda c: c.all_to_all_single(torch.ones(2), torch.ones(2), 1, 1),
    "out as None": lambda c: c.all_to_all_single(None, torch.ones(2), [1, 1], [1, 1]),
    "a plan of None": lambda c: c.plan([None], "a@ -> a"),
    "a plan without a spec": lambda c: c.plan([torch.ones(2)], None),
    "a plan of a generator": lambda c: c.plan((x for x in [torch.ones(2)]), "a@ -> a"),
    "a plan of one tensor": lambda c: c.plan(torch.ones(2), "a@ -> a"),
    "a shape as a word": lambda c: c.empty("x"),
    "a shape as a float": lambda c: c.empty(2.5),
    "a dtype as a word": lambda c: c.empty(2, "float32"),
    "blocks as a float": lambda c: c.budget(8.0).__enter__(),  # type: ignore[arg-type]
    "a heap as a word": lambda c: c.reserve("x"),
    "a heap as a float": lambda c: c.reserve(1.5),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_is_named_and_the_next_run_works(name: str) -> None:
    """Raised out of LocalWorld.run, not caught inside it: all ranks raise alike, so the world lives."""
    with LocalWorld(2, timeout=10) as world:
        with pytest.raises(ArgumentTypeError):
            world.run(WRONG_TYPES[name])
        assert [float(x[0]) for x in world.run(lambda c: c.all_reduce(torch.ones(2)))] == [2.0, 2.0]


@pytest.mark.parametrize("heap_bytes", [-1, -6_000_000, 1 << 50, 1 << 64])
def test_a_heap_that_cannot_be_is_refused_and_the_old_one_stays(heap_bytes: int) -> None:
    with LocalWorld(2, timeout=10, heap_bytes=4096) as world:
        with pytest.raises(ShapeError, match="heap_bytes"):
            world.run(lambda c: c.reserve(heap_bytes))
        assert world.run(lambda c: c.empty((4,)).numel()) == [4, 4]
        assert [float(x[0]) for x in world.run(lambda c: c.all_reduce(torch.ones(2)))] == [2.0, 2.0]


def test_bad_input_of_one_rank_ends_the_world_by_name() -> None:
    def one_is_wrong(c: Communicator) -> None:
        c.redistribute(torch.ones(2, 2) if c.rank else torch.ones(2), "a@ -> a")

    with LocalWorld(2, timeout=10) as world:
        with pytest.raises(ShapeError):
            world.run(one_is_wrong)
        with pytest.raises(PeerError, match="ShapeError"):
            world.run(lambda c: c.barrier())


@pytest.mark.parametrize("ranks", ["2", 2.0, None, True, 0])
def test_a_world_needs_a_count(ranks: object) -> None:
    with pytest.raises(SetupError, match="count"):
        LocalWorld(ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", None),
        ("timeout", float("nan")),
        ("timeout", 0),
        ("heap_bytes", -1),
        ("heap_bytes", "x"),
        ("teams", "2"),
        ("teams", 1.5),
        ("teams", True),
        ("scratch", "x"),
        ("tuning", {}),
        ("device", None),
        ("device", 3),
    ],
)
def test_terms_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SetupError, match=name):
        LocalWorld(1, **{name: value})


@pytest.mark.parametrize(("rank", "ranks"), [("0", 1), (0, None), (1, 1), (-1, 1)])
def test_a_store_needs_a_rank_among_ranks(rank: Any, ranks: Any) -> None:
    with pytest.raises(SetupError, match="0 <= rank < ranks"):
        Communicator(HashStore(), rank=rank, ranks=ranks)


def test_an_output_of_negative_extent_is_refused() -> None:
    with LocalWorld(1, heap_bytes=4096) as world, pytest.raises(ShapeError, match="0 or more"):
        world.communicators[0].empty((-1,))
