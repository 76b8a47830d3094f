"""How many blocks of a GPU a team of a planned call has: as planning says, and explain() with it. Planned by the CPU's module: nothing is run."""

from __future__ import annotations

import torch
from torch import Tensor

from purlin_core import _cpu
from purlin_core.atom import Host
from purlin_core.prepare import Asked, Prepared, Site, in_place, prepare, prepare_all_to_all
from purlin_core.tune import PARTS_TEAM_BYTES, Regime, Tuning, cuda_scratch

TEAMS, BLOCKS = 32, 132
ROWS, WIDTH = 512, 4 * TEAMS * PARTS_TEAM_BYTES // 512  # a quarter of them is as much as makes a call large


def site_of(blocks: int = BLOCKS) -> Site:
    scratch = cuda_scratch(2)
    sizes = {"teams": scratch.teams, "slots": scratch.slots, "slot_bytes": scratch.slot_bytes}
    geometry = _cpu.Geometry(ranks=2, **sizes, window_bytes=scratch.window_bytes, heap_bytes=0)
    return Site(0, 2, scratch, geometry, Host(), Tuning("NVIDIA Test 100"), blocks)


def asked(spec: str, budget: int = 0, *, granted: bool = False) -> Asked:
    return Asked("redistribute", spec, (), "sum", "", torch.device("cpu"), granted, budget=budget)


def tensor(rows: int = ROWS) -> Tensor:
    return torch.empty(rows, WIDTH, dtype=torch.uint8)


def blocks_that_it_says(prepared: Prepared) -> int:
    text = prepared.explain()
    return next((parts for parts in (2, 3) if f"team(s) of {parts} blocks" in text), 1)


def test_a_team_has_a_block_for_what_stays_at_home_as_long_as_there_are_blocks() -> None:
    for spec in ("r@ c -> r c@", "r@ c -> r c"):
        for blocks, parts in ((BLOCKS, 3), (3 * TEAMS, 3), (3 * TEAMS - 1, 2), (2 * TEAMS, 2), (2 * TEAMS - 1, 1)):
            for prepared in (
                prepare(site_of(blocks), asked(spec), [tensor()], None),
                prepare(site_of(), asked(spec, blocks), [tensor()], None),
            ):
                assert prepared.schedule.regime is Regime.STAGED
                assert prepared.schedule.parts == prepared.arguments["parts"] == blocks_that_it_says(prepared) == parts


def test_granted_copies_and_sums_have_none() -> None:
    for spec, granted, parts in (("r@ c -> r c@", True, 2), ("+r c -> r@ c", False, 2), ("+r c -> r c", False, 2)):
        prepared = prepare(site_of(), asked(spec, granted=granted), [tensor().view(torch.int8)], None)
        assert prepared.schedule.parts == blocks_that_it_says(prepared) == parts


def test_a_gather_in_place_has_none() -> None:
    x = tensor()
    prepared = prepare(site_of(), asked("r@ c -> r c"), [x], None)
    placed = in_place(site_of(), prepared, [x.data_ptr()], [x.data_ptr()])
    assert (prepared.schedule.parts, placed.schedule.parts) == (3, 2)
    assert (blocks_that_it_says(placed), placed.arguments["parts"]) == (2, 2)
    assert placed.signature == prepared.signature  # a rank in place and one apart are in the same call


def test_an_exchange_with_sizes_has_one_where_a_rank_keeps_much() -> None:
    for kept, parts in ((0, 2), (8, 2), (ROWS // 2, 3)):
        sizes = (kept, ROWS // 2)
        x, out = tensor(sum(sizes)), tensor(sum(sizes))
        prepared = prepare_all_to_all(site_of(), asked(""), x, out, sizes, sizes)
        assert prepared.schedule.parts == prepared.arguments["parts"] == blocks_that_it_says(prepared) == parts


def test_padding_counts_among_what_packets_carry() -> None:
    """An item begins at a multiple of 16 bytes, so two tensors may need more of a window than they have bytes."""
    scratch = cuda_scratch(2)
    for short in (1, 15, 16, 17):
        xs = [torch.empty(n, dtype=torch.uint8) for n in (short, scratch.packet_bytes - short)]
        for spec in ("n@ -> n", "+n -> n"):
            fits = short % 16 == 0
            regime = Regime.PACKET if fits else Regime.STAGED
            assert prepare(site_of(), asked(spec), xs, None).schedule.regime is regime
