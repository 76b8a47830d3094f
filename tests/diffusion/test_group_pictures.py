"""Pictures of pipelines that each rank has its own of, as processes do: what one rank meets is named on all, and the next picture begins alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from purlin_diffusion.pipelines import flux
from torch import Tensor

from purlin_core import Communicator, LocalWorld, PeerError
from purlin_diffusion import InputsDifferError, parallelize

RANKS, FAILING = 3, 1
TOLERANCE = 1e-4


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    with LocalWorld(RANKS, timeout=20) as world:
        yield world


def drawn(pipe: Any, prompt: Any = "an oak", **changes: Any) -> Tensor:
    call = {"height": 48, "width": 80, "num_inference_steps": 3, "max_sequence_length": 31, "output_type": "latent"}
    latents: Tensor = pipe(prompt, generator=torch.Generator().manual_seed(0), **call, **changes).images
    return latents


def plain() -> Any:
    pipe = flux.tiny()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def met_and_after(world: LocalWorld, fail: Callable[[Any, bool], Any], *, pictures: int = 2) -> list[Any]:
    """By rank: what fail(pipe, on the rank that fails?) met, and what each of the next pictures did or gave."""

    def caught(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            return error

    def rank_of(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        pipe = plain()
        handle = parallelize(pipe, communicator=comm)
        met = caught(fail, pipe, comm.rank == FAILING)
        after = [caught(drawn, pipe) for _ in range(pictures)]
        handle.undo()
        return met, after

    return world.run(rank_of)


def raising(error: BaseException, step: int = 0) -> Callable[[Any, bool], Any]:
    """A picture in which a callback raises behind a step, on one rank."""

    def fail(pipe: Any, fails: bool) -> Any:
        def callback(_pipe: Any, at: int, _time: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if fails and at == step:
                raise error
            return kept

        return drawn(pipe, callback_on_step_end=callback)

    return fail


@pytest.mark.parametrize("step", [0, 1, 2])
def test_what_one_rank_meets_in_a_callback_is_raised_on_all_and_the_next_picture_is_right(
    world: LocalWorld, step: int
) -> None:
    """Amid the steps, and after the last of them, when nobody calls the denoiser any more."""
    one = drawn(plain())
    for rank, (met, after) in enumerate(met_and_after(world, raising(KeyError("out of glue"), step))):
        assert type(met) is (KeyError if rank == FAILING else InputsDifferError), (rank, met)
        assert rank == FAILING or "rank 1 has an error: KeyError: 'out of glue'" in str(met), met
        assert all((out - one).abs().max() <= TOLERANCE for out in after)


def test_a_rank_that_leaves_a_picture_before_its_steps_is_named_on_the_others_and_the_next_picture_is_right(
    world: LocalWorld,
) -> None:
    """It goes on to its next picture, where it waits for them."""
    one = drawn(plain())
    ranks = met_and_after(world, lambda pipe, fails: drawn(pipe, 5 if fails else "an oak"))
    for rank, (met, after) in enumerate(ranks):
        assert type(met) is (ValueError if rank == FAILING else InputsDifferError), (rank, met)
        assert rank == FAILING or "rank 1 left picture 1 before its steps began" in str(met), met
        assert all((out - one).abs().max() <= TOLERANCE for out in after)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error", [UnspeakableError(), ValueError("\udc80")], ids=["no text", "no text that can be encoded"]
)
def test_an_exception_that_cannot_be_told_is_told_by_its_type(world: LocalWorld, error: Exception) -> None:
    one = drawn(plain())
    for rank, (met, after) in enumerate(met_and_after(world, raising(error))):
        assert met is error if rank == FAILING else f"an error: {type(error).__name__}" in str(met), (rank, met)
        assert all((out - one).abs().max() <= TOLERANCE for out in after)


def test_where_there_are_no_more_calls_the_next_one_says_the_cure(world: LocalWorld) -> None:
    """An exception within the denoiser, amid exchanges that others wait in."""

    def fail(pipe: Any, fails: bool) -> Any:
        def hook(*_: Any) -> None:
            raise MemoryError("no room")

        if not fails:
            return drawn(pipe)
        held = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(hook)
        try:
            return drawn(pipe)
        finally:
            held.remove()

    for rank, (met, (again,)) in enumerate(met_and_after(world, fail, pictures=1)):
        assert type(met) is (MemoryError if rank == FAILING else PeerError), (rank, met)
        assert type(again) is PeerError and "undo() and parallelize again" in str(again), (rank, again)
