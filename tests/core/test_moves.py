"""Moves, run over raw bytes in plain numpy, do what the reference means, and both ends of each agree on them."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from purlin_core.moves import MAX_DIMS, WIRE_ALIGN, Kind, Route
from purlin_core.plan import all_to_all_moves, largest_message, seen_by
from tests.core.drawn_calls import calls, each_kind, many, some
from tests.core.placed import Placed, World, wire_of


@each_kind
@many
@given(data=st.data())
def test_moves_do_what_the_spec_means(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    world = call.world()
    expected = [
        case.spec.reference([x[i].view.clone() for x in world.inputs], sizes=case.sizes, op=call.op)
        for i, case in enumerate(call.cases)
    ]
    before = [[placed.arena.copy() for placed in row] for row in world.inputs]
    around = [[placed.surroundings() for placed in row] for row in world.outputs]
    world.run(call.op)
    for rank in range(call.ranks):
        for i in range(len(call.cases)):
            out = world.outputs[rank][i]
            assert out.holds(expected[i][rank])
            assert np.array_equal(out.surroundings(), around[rank][i])
            assert np.array_equal(world.inputs[rank][i].arena, before[rank][i])


@each_kind
@some
@given(data=st.data())
def test_both_ends_of_a_pair_count_alike(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    moves = [moves for _, moves in call.plans()]
    for source, reader in permutations(range(call.ranks), 2):
        send, receive = moves[source].send[reader], moves[reader].receive[source]
        if moves[0].kind is Kind.ALL_REDUCE:  # the reader's slice goes there, the source's slice comes back
            assert (send.lo, send.bytes, send.payload) == wire_of(moves[reader].own_to)
            assert (receive.lo, receive.bytes, receive.payload) == wire_of(moves[source].own_to)
        else:
            assert wire_of(send) == wire_of(receive)
        if moves[0].kind is Kind.COPY:
            assert [(i.tensor, i.at, i.box.bytes) for i in send.items] == [
                (i.tensor, i.at, i.box.bytes) for i in receive.items
            ]
    for rank in range(call.ranks):
        assert wire_of(moves[rank].own_from) == wire_of(moves[rank].own_to)
        assert moves[rank].send[rank] == moves[rank].receive[rank] == Route()


@each_kind
@some
@given(data=st.data())
def test_items_are_full_aligned_in_order_and_within_the_dims_of_a_box(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    for _, moves in call.plans():
        for route in (*moves.send, *moves.receive, moves.own_from, moves.own_to):
            end = 0
            for item in route.items:
                assert item.at % WIRE_ALIGN == 0
                assert end <= item.at < end + WIRE_ALIGN
                assert item.box.bytes > 0
                assert len(item.box.extents) <= MAX_DIMS
                assert 1 not in item.box.extents
                end = item.at + item.box.bytes
            if moves.kind is Kind.COPY:
                assert (route.lo, route.bytes) == (0, end)
                assert route.payload == sum(item.box.bytes for item in route.items)


@each_kind
@some
@given(data=st.data())
def test_every_rank_knows_what_the_others_bring(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    plans = call.plans()
    largest = max(route.bytes for _, moves in plans for route in moves.send)
    for rank, (operands, moves) in enumerate(plans):
        for peer, (theirs, _) in enumerate(plans):
            assert [seen_by(operand, rank, call.ranks, peer) for operand in operands] == theirs
        if moves.kind is not Kind.ALL_REDUCE:
            assert largest_message(operands, rank, call.ranks) == largest


@many
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 4), min_size=n * n, max_size=n * n))
    ),
    st.integers(0, 3),
    st.integers(0, 1 << 30),
)
def test_all_to_all_single_takes_any_matrix(drawn: tuple[int, list[int]], columns: int, seed: int) -> None:
    ranks, flat = drawn
    rows = np.array(flat).reshape(ranks, ranks)  # rows[s][d] go from s to d
    random = Random(seed)
    shape = (columns, 2) if columns else ()
    inputs = [[Placed.anywhere((int(rows[r].sum()), *shape), torch.float16, random)] for r in range(ranks)]
    outputs = [[Placed.anywhere((int(rows[:, r].sum()), *shape), torch.float16, random)] for r in range(ranks)]
    moves = []
    for rank in range(ranks):
        x, out = inputs[rank][0].view, outputs[rank][0].view
        moves.append(
            all_to_all_moves(
                x.shape,
                x.stride(),
                out_shape=out.shape,
                out_strides=out.stride(),
                itemsize=2,
                rank=rank,
                ranks=ranks,
                in_sizes=rows[rank].tolist(),
                out_sizes=rows[:, rank].tolist(),
            )
        )
    parts = [torch.split(x[0].view, rows[r].tolist()) for r, x in enumerate(inputs)]
    expected = [torch.cat([parts[source][rank] for source in range(ranks)]) for rank in range(ranks)]
    around = [out[0].surroundings() for out in outputs]
    World(moves, inputs, outputs).run()
    for rank in range(ranks):
        assert outputs[rank][0].holds(expected[rank])
        assert np.array_equal(outputs[rank][0].surroundings(), around[rank])
