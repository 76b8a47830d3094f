"""Ranks that hold a model each (as processes do) record and replay alike, whatever one of them sees; what one cannot do, none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from purlin_core import PeerError
from purlin_diffusion import Handle, ParallelConfig
from tests.diffusion.conftest import TOLERANCE, flux
from tests.diffusion.echo import RECORDING_BYTES, Studio, done
from tests.diffusion.test_changes import weigh
from tests.diffusion.test_graph_calls import on_ranks


def difference(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


def caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_whose_weights_moved_makes_all_begin_anew(odd: int) -> None:
    case = flux()
    one = case.run()

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        outs = [run() for _ in range(3)]
        counts = [done(handle)[0]]
        if rank == odd:
            model = handle.sessions[0].sharded.model
            model.proj_out.weight = nn.Parameter(model.proj_out.weight.detach().clone())
        for _ in range(3):
            outs.append(run())
            counts.append(done(handle)[0])
        return max(difference(out, one) for out in outs), counts

    for worst, counts in on_ranks(case, rank_of, studios=[Studio(), Studio()]):
        assert worst <= TOLERANCE
        captured, replayed = [each[0] for each in counts], [each[1] for each in counts]
        assert captured == [1, 1, 2, 2] and replayed == [2, 2, 3, 4]  # eager, recorded by both, replayed by both


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_what_one_rank_cannot_record_all_run_eagerly(kind: type[Exception], odd: int) -> None:
    case = flux()
    one = case.run()
    studios = [Studio(late=True), Studio(late=True)]

    def fail(_: torch.device) -> None:
        raise kind("no capture here")

    studios[odd].fails = fail

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        worst = max(difference(run(), one) for _ in range(4))
        return worst, done(handle)[0], handle.explain()

    for rank, (worst, counts, text) in enumerate(on_ranks(case, rank_of, studios=studios)):
        assert worst <= TOLERANCE
        assert counts == ((0, 0, 0) if rank == odd else (1, 0, 1))
        assert f"rank {odd}: {kind.__name__}: no capture here" in text


@pytest.mark.parametrize("odd", [0, 1])
def test_what_one_rank_has_no_room_for_none_keeps(odd: int) -> None:
    case = flux()
    studios = [Studio(), Studio()]
    studios[odd].room = RECORDING_BYTES

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        outs = [run() for _ in range(4)]
        return all(torch.equal(out, outs[0]) for out in outs), done(handle)[0]

    results = on_ranks(case, rank_of, studios=studios)
    assert all(alike for alike, _ in results) and all(counts == (1, 0, 1) for _, counts in results)
    assert not any(pool.live for studio in studios for pool in studio.pools)


def test_ranks_of_which_one_wants_no_graphs_make_none() -> None:
    case = flux()
    studios = [Studio(), Plain()]

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        outs = [run() for _ in range(4)]
        return all(torch.equal(out, outs[0]) for out in outs), done(handle)[0]

    assert on_ranks(case, rank_of, studios=studios) == [(True, (0, 0, 0))] * 2


class Plain(Studio):
    def open(self, pipe_or_model: Any, config: Any = None, *, apart: bool = False, **where: Any) -> Handle:
        return super().open(pipe_or_model, ParallelConfig(graph=False), apart=apart, **where)


def test_inputs_are_the_roots_in_a_replay_too() -> None:
    case = flux()
    one = case.run()

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        drifted = {name: value + rank for name, value in case.inputs.items()}
        return [run(**drifted) for _ in range(3)], done(handle)[0]

    for outs, counts in on_ranks(case, rank_of, studios=[Studio(), Studio()]):
        assert counts == (1, 2, 0) and max(difference(out, one) for out in outs) <= TOLERANCE


def test_an_exception_of_one_rank_in_a_replay_reaches_the_others_with_its_text() -> None:
    case = flux()

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        failing = []

        def fail(*_: Any) -> None:
            if failing:
                raise RuntimeError("out of glue")

        model = handle.sessions[0].sharded.model
        model.norm_out.register_forward_hook(fail)
        for _ in range(3):
            run()
        assert done(handle)[0] == (1, 2, 0)
        if rank == 1:
            failing.append(True)
        return caught(run)

    results = on_ranks(case, rank_of, studios=[Studio(), Studio()])
    assert isinstance(results[0], PeerError) and "rank 1 left: RuntimeError: out of glue" in str(results[0])
    assert isinstance(results[1], RuntimeError)


def test_a_weight_changed_on_all_ranks_is_followed() -> None:
    case, plain = flux(), flux()
    weigh(plain.model.proj_out)
    wanted = plain.run()

    def rank_of(rank: int, handle: Handle, run: Callable[..., Tensor]) -> Any:
        run()
        run()
        model = handle.sessions[0].sharded.model
        model.proj_out = nn.Linear(model.proj_out.in_features, model.proj_out.out_features)
        weigh(model.proj_out)
        return [run() for _ in range(3)], done(handle)[0]

    for outs, counts in on_ranks(case, rank_of, studios=[Studio(), Studio()]):
        assert counts == (2, 3, 1) and max(difference(out, wanted) for out in outs) <= TOLERANCE
