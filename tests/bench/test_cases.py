"""Cases against the reference, and whoever carries them out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import benchmarks
import pytest
import torch
from bench import gpu, measure, rivals
from bench.cases import (
    COLLECTIVES,
    FLUX_HEADS,
    FLUX_TOKENS,
    SHAPES,
    UNEVEN,
    Case,
    Step,
    collective,
    expected,
    fits,
    in_shape,
    make,
    out_shape,
    shape,
    values_of,
)
from bench.worlds import Force, World

from purlin_core.moves import Kind
from purlin_core.plan import Operand, contiguous, freeze_sizes, largest_message
from purlin_core.spec import Spec
from purlin_core.tune import Regime, choose, cuda_scratch

CPU = torch.device("cpu")
SMALL = Step("b s@ h d -> b s h@ d", (1, 4, 12, 8), 3, strided=True), Step("b s h@ d -> b s@ h d", (1, 12, 4, 8))


def cases(ranks: int) -> list[Case]:
    places = [(name, in_place) for name in (*COLLECTIVES, *UNEVEN) for in_place in gpu.IN_PLACE[name]]
    found = [collective(name, ranks, 240, torch.bfloat16, in_place=in_place) for name, in_place in places]
    return [*found, Case("flux1024_qkv_o_small", ranks, 1, torch.float32, SMALL)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_must_come_of_a_case_is_what_its_spec_means(ranks: int) -> None:
    for case in cases(ranks):
        for index, step in enumerate(case.steps):
            if any(size % ranks for size in step.shape[1:3]):
                continue
            inputs = [values_of(case, index, rank, 5, CPU)[0] for rank in range(ranks)]
            wanted = Spec.parse(step.spec).reference(inputs, sizes=step.sizes)
            for rank in range(ranks):
                out = expected(step, inputs, rank)
                assert torch.equal(out, wanted[rank])
                assert tuple(out.shape) == out_shape(step, ranks, rank=rank)


def test_ours_is_right_on_every_case_and_a_wrong_byte_is_seen(world: World) -> None:
    for case in cases(world.ranks):
        for granted in (False, True):
            rival = rivals.purlin(case, world, 3, granted=granted)
            measure.check(world, rival)
            outs = rival.sets[1][0][-1][1]
            outs[-1].view(-1)[-1] += 1
            assert rival.wrong(0) == ""
            assert rival.wrong(1).startswith("rank 0, call 1")
            outs[-1].fill_(float("nan"))
            assert rival.wrong(1)


def test_yardsticks_run_where_all_ranks_share_a_device(world: World) -> None:
    for case in cases(world.ranks):
        for make_one in (rivals.torch_copy, rivals.purlin_copy):
            measure.check(world, make_one(case, world, 2))
    measure.check(world, rivals.torch_relayout(cases(world.ranks)[-1], world, 2))


def test_a_rival_that_does_nothing_is_wrong(world: World) -> None:
    case = cases(world.ranks)[0]
    rival = rivals.purlin(case, world, 1, granted=False)
    rival.call = lambda rank, turn: None
    with pytest.raises(measure.WrongError):
        measure.check(world, rival)


def test_tensors_in_place_are_parts_of_each_other() -> None:
    empty = lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)  # noqa: E731
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        (((x,), (out,)),) = make(collective(name, 2, 64, torch.float32, in_place=True), 1, empty, empty)
        small, large = (x, out) if name == "all_gather" else (out, x)
        offset = 0 if name == "all_reduce" else large.nbytes // 2
        assert small.data_ptr() == large.data_ptr() + offset
    with pytest.raises(ValueError, match="all_to_all"):
        make(collective("all_to_all", 2, 64, torch.float32, in_place=True), 1, empty, empty)


def test_bytes_and_bus_bandwidth_are_those_of_nccl_tests() -> None:
    factors = {"all_gather": 3 / 4, "reduce_scatter": 3 / 4, "all_reduce": 3 / 2, "all_to_all": 3 / 4}
    for name, factor in factors.items():
        case = collective(name, 4, 4096, torch.bfloat16)
        whole = out_shape(case.steps[0], 4, rank=0) if name == "all_gather" else case.steps[0].shape
        assert torch.Size(whole).numel() * 2 == 4096
        assert case.busbw_bytes == 4096 * factor


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", UNEVEN)
def test_the_largest_message_of_uneven_shares_is_that_of_the_even_case_of_their_bytes(name: str, ranks: int) -> None:
    case = collective(name, ranks, 240 * ranks, torch.bfloat16)
    even = collective(name.removesuffix("_v"), ranks, 240 * ranks, torch.bfloat16)
    assert case.even == even
    for rank in range(ranks):
        assert [largest_message([operand(each, rank)], rank, ranks) for each in (case, even)] == [240, 240]
    assert (case.bytes, case.busbw_bytes) == (even.bytes, even.busbw_bytes)
    copied, even_copied = ([each.copied_bytes(rank) for rank in range(ranks)] for each in (case, even))
    assert sum(copied) < sum(even_copied)
    assert all(ours <= theirs for ours, theirs in zip(copied, even_copied, strict=True))


def operand(case: Case, rank: int) -> Operand:
    (step,) = case.steps
    shape, out = (of(step, case.ranks, rank=rank) for of in (in_shape, out_shape))
    spec, sizes = Spec.parse(step.spec), freeze_sizes(step.sizes)
    return Operand(spec, shape, contiguous(shape), contiguous(out), case.dtype.itemsize, "bfloat16", sizes)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_flux_moves_the_bytes_that_it_has(ranks: int) -> None:
    tensor = FLUX_TOKENS * FLUX_HEADS * 128 * 2
    bytes_of = {name: shape(name, ranks).bytes for name in SHAPES}
    assert bytes_of == {
        "flux1024_qkv_o": 4 * tensor // ranks,
        "flux1024_qkv_o_strided": 4 * tensor // ranks,
        "flux1024_kv": 2 * tensor,
        "flux1024_kv_strided": 2 * tensor,
    }
    assert shape("flux1024_qkv_o", ranks).busbw_bytes == 4 * tensor * (ranks - 1) / ranks**2
    assert fits("flux1024_kv", ranks)
    assert not fits("flux1024_kv", 5)


@pytest.mark.parametrize("name", ["all_gather", "all_gather_v"])
def test_buffers_rotate_beyond_the_cache_or_stay_within_it(world: World, name: str) -> None:
    l2_bytes = 60 << 20
    for size in (1 << k for k in range(10, 29)):
        unit = 2 * world.ranks
        case = collective(name, world.ranks, size // unit * unit, torch.bfloat16)
        found = measure.rotations(case, world, l2_bytes)
        assert found
        for rotation in found:
            turned = rotation.depth * case.touched_bytes * world.ranks
            assert turned <= l2_bytes // 2 if rotation.hot else turned >= 1.5 * l2_bytes
            assert rotation.calls % rotation.depth == 0
            assert rotation.calls >= rotation.depth <= measure.MOST_SETS
            granted = rotation.depth * (case.touched_bytes + 8192) * (1 + case.uneven)
            assert granted <= gpu.room_bytes([case], world.ranks)


def test_what_cannot_run_says_why(world: World) -> None:
    case = collective("all_reduce", world.ranks, 240, torch.bfloat16, in_place=True)
    for entry in gpu.entries_of(case, world, []):
        if entry.provider in benchmarks.RIVALS:
            with pytest.raises(rivals.UnavailableError, match="needs a process"):
                entry.make(case, world, 1)
    with pytest.raises(rivals.UnavailableError, match="no relayout"):
        rivals.torch_relayout(case, world, 1)


def test_shares_that_nccl_has_no_call_for_say_so_and_even_ones_have_no_even_ones_beside_them(world: World) -> None:
    apart = replace(world, name="processes")
    for name in ("all_gather_v", "reduce_scatter_v"):
        for make_one in (rivals.nccl, rivals.nccl_symmetric):
            with pytest.raises(rivals.UnavailableError, match="equal shares only"):
                make_one(collective(name, world.ranks, 240, torch.bfloat16), apart, 1)
    with pytest.raises(rivals.UnavailableError, match="shares are equal"):
        rivals.purlin_even(collective("all_gather", world.ranks, 240, torch.bfloat16), world, 1, granted=False)


@pytest.mark.parametrize("name", ["all_to_all", "all_to_all_v"])
def test_nccl_gets_an_all_to_all_cut_as_it_must_be(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rivals.dist, "all_to_all_single", lambda *given: calls.append(given))
    rival = rivals.nccl(collective(name, world.ranks, 240, torch.bfloat16), replace(world, name="processes"), 1)
    rival.fill(0)
    for rank in world.here:
        rival.call(rank, 0)
    for rank, (out, _, *cuts) in enumerate(calls):
        pieces = [x.split(*gives[1:] or (1,))[rank] for _, x, *gives in calls]
        assert not cuts or [len(piece) for piece in pieces] == cuts[0]
        out.copy_(torch.cat(pieces))
    assert rival.wrong(0) == ""


def test_relayouts_are_those_that_an_all_to_all_needs() -> None:
    x = torch.arange(2 * 6 * 4).view(1, 2, 6, 4)
    sent = rivals.to_heads(x, 3)
    assert sent.is_contiguous()
    assert all(torch.equal(sent[rank], x[0, :, 2 * rank : 2 * rank + 2]) for rank in range(3))


@pytest.mark.parametrize("text", ["direct", "direct:0", "pigeon:8", "staged:x", ""])
def test_what_cannot_be_forced_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="REGIME:CTAS"):
        Force.parse(text)


@pytest.mark.parametrize("regime", Regime)
def test_a_forced_call_goes_as_it_must(regime: Regime) -> None:
    force = Force(regime, 8, strict=True)
    assert Force.parse(str(force)) == force
    tuning = force.tuning("NVIDIA Test", 8)
    for size in (1, 8192):
        schedule = choose(tuning, Kind.COPY, cuda_scratch(2), largest=size, granted=force.granted, name="halo", ranks=2)
        assert (schedule.regime, schedule.teams) == (regime, 8)
