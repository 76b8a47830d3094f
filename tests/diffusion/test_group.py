"""Ranks that each hold their model, as processes do: here threads with a communicator of their own. Inputs come from the root."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from purlin_diffusion.pipelines import flux
from torch import Tensor

from purlin_core import Communicator, LocalWorld, MismatchError, PeerError
from purlin_diffusion import (
    ArgumentError,
    ConfigError,
    Handle,
    InputsDifferError,
    NotBuiltError,
    ParallelConfig,
    parallelize,
)
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.host_carrier import HostCarrier
from purlin_diffusion.inputs import Carriers, describe, from_root
from purlin_diffusion.route import results_bytes

RANKS = 3


@pytest.fixture
def world() -> Iterator[LocalWorld]:
    with LocalWorld(RANKS, timeout=20) as world:
        yield world


def on_ranks(
    world: LocalWorld, case: Any, fn: Callable[[Communicator, Handle, Callable[..., Tensor]], Any], **config: Any
) -> list[Any]:
    """fn(communicator, handle, run) on every rank, with a copy of the model each."""
    models = [case.model, *(copy.deepcopy(case.model) for _ in range(world.ranks - 1))]

    def rank_of(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        model = models[comm.rank]
        handle = parallelize(model, ParallelConfig(**config), communicator=comm)
        try:
            return fn(comm, handle, lambda **changes: case.run(model, **changes))
        finally:
            handle.undo()

    return world.run(rank_of)


def caught(call: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return call(**arguments)
    except Exception as error:
        return error


@pytest.mark.parametrize("mode", ["gather_kv", "ulysses"])
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_every_rank_gets_what_one_rank_gives(
    world: LocalWorld, tiny: Callable[..., Any], family: str, mode: str
) -> None:
    case = tiny(family)
    one = case.run()

    def rank_of(comm: Communicator, handle: Handle, run: Callable[..., Tensor]) -> Tensor:
        assert (handle.rank, handle.ranks, handle.is_root) == (comm.rank, RANKS, comm.rank == 0)
        assert [counters.rank for counters in handle.counters] == [comm.rank]
        return run()

    for out in on_ranks(world, case, rank_of, attention=mode):
        assert (out - one).abs().max() <= 1e-5


def test_tensors_come_from_the_root(world: LocalWorld, tiny: Callable[..., Any]) -> None:
    """A seed, a scheduler or a callback that differs on one rank changes nothing."""
    case = tiny("flux")
    one = case.run()

    def rank_of(comm: Communicator, handle: Handle, run: Callable[..., Tensor]) -> Tensor:
        drifted = {name: value + comm.rank for name, value in case.inputs.items()}
        return run(**drifted)

    outs = on_ranks(world, case, rank_of)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert (outs[0] - one).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"hidden_states": torch.zeros(2, 34, 16)}, r"hidden_states: torch\.float32 tensor \(2, 34, 16\)"),
        (
            {"encoder_hidden_states": torch.zeros(2, 11, 32, dtype=torch.float64)},
            r"encoder_hidden_states: torch\.float64",
        ),
        ({"joint_attention_kwargs": {"scale": 0.5}}, r"joint_attention_kwargs\['scale'\]: 0\.5"),
        ({"controlnet_blocks_repeat": True}, "controlnet_blocks_repeat: True"),
        ({"plywood": 3}, "an error: .*plywood"),
    ],
)
def test_inputs_that_differ_are_named_on_all_and_the_next_call_works(
    world: LocalWorld, tiny: Callable[..., Any], odd: dict[str, Any], text: str
) -> None:
    case = tiny("flux")
    one = case.run()

    def rank_of(comm: Communicator, handle: Handle, run: Callable[..., Tensor]) -> Any:
        return caught(run, **(odd if comm.rank == 1 else {})), run()

    for error, out in on_ranks(world, case, rank_of):
        assert isinstance(error, InputsDifferError)
        assert (out - one).abs().max() <= 1e-5
        with pytest.raises(InputsDifferError, match=f"Rank 0 has .*rank 1 has .*{text}"):
            raise error


def test_what_is_wrong_on_all_ranks_is_named_and_the_next_call_works(
    world: LocalWorld, tiny: Callable[..., Any]
) -> None:
    case = tiny("flux")

    def rank_of(comm: Communicator, handle: Handle, run: Callable[..., Tensor]) -> Any:
        wrong = [{"plywood": 3}, {"joint_attention_kwargs": {"ip_adapter_masks": 1}}]
        return [
            *(caught(run, **each) for each in wrong),
            caught(handle._sessions[0].sharded.model, **case.inputs),
            run(),
        ]

    for *errors, out in on_ranks(world, case, rank_of):
        assert [type(error) for error in errors] == [ArgumentError] * 3
        assert out.isfinite().all()


def test_an_exception_of_one_rank_reaches_the_others_with_its_text(world: LocalWorld, tiny: Callable[..., Any]) -> None:
    case = tiny("flux")

    def rank_of(comm: Communicator, handle: Handle, run: Callable[..., Tensor]) -> Any:
        if comm.rank == 2:

            def fail(*_: Any) -> None:
                raise RuntimeError("out of glue")

            handle._sessions[0].sharded.model.norm_out.register_forward_hook(fail)
        began = time.monotonic()
        return caught(run), time.monotonic() - began

    results = on_ranks(world, case, rank_of)
    assert isinstance(results[2][0], RuntimeError) and "out of glue" in str(results[2][0])
    for error, seconds in results[:2]:
        assert isinstance(error, PeerError) and "rank 2 left: RuntimeError: out of glue" in str(error)
        assert seconds < 5


def test_ranks_that_ask_for_different_modes_are_named(world: LocalWorld, tiny: Callable[..., Any]) -> None:
    case = tiny("flux")

    def rank_of(comm: Communicator) -> Any:
        mode = "ulysses" if comm.rank == 1 else "gather_kv"
        handle = parallelize(copy.deepcopy(case.model), ParallelConfig(attention=mode), communicator=comm)
        return caught(case.run, model=handle._sessions[0].sharded.model)

    assert {type(error) for error in world.run(rank_of)} <= {MismatchError, PeerError}


@pytest.mark.parametrize(
    "value", [torch.tensor(3), torch.tensor([True, False]), torch.zeros(0, 2), torch.arange(5, dtype=torch.int64)]
)
def test_any_tensor_comes_from_the_root(world: LocalWorld, value: Tensor) -> None:
    arguments = {"x": [value, {"y": (value, None, 2.5)}], "z": "birch"}

    def rank_of(comm: Communicator) -> Any:
        mine = (
            arguments
            if comm.rank == 0
            else {"x": [value.clone().fill_(0), {"y": (value.clone().fill_(0), None, 2.5)}], "z": "birch"}
        )
        return from_root(mine, Carriers(device=comm, host=comm))[0]

    for got in world.run(rank_of):
        assert got["z"] == "birch" and got["x"][1]["y"][1:] == (None, 2.5)
        assert torch.equal(got["x"][0], value) and torch.equal(got["x"][1]["y"][0], value)


@pytest.mark.parametrize("count", [16, 17, 57])
def test_any_number_of_tensors_comes_from_the_root(world: LocalWorld, count: int) -> None:
    """A ControlNet hands over more residuals than one exchange may have."""

    def rank_of(comm: Communicator) -> Any:
        mine = {"x": [torch.full((2,), 100 * comm.rank + i) for i in range(count)]}
        return from_root(mine, Carriers(device=comm, host=comm))[0]

    for got in world.run(rank_of):
        assert [x.tolist() for x in got["x"]] == [[i, i] for i in range(count)]


def test_a_host_carrier_makes_the_calls_of_its_device(world: LocalWorld) -> None:
    def rank_of(comm: Communicator) -> Any:
        host = HostCarrier(comm, torch.device("cpu"))
        assert isinstance(host, Carrier) and (host.rank, host.ranks) == (comm.rank, RANKS)
        before = comm.stats().calls
        arguments = {"x": torch.full((2,), comm.rank), "y": 2}
        got, _ = from_root(arguments, Carriers(device=comm, host=host))
        wrong = caught(from_root, arguments={"y": comm.rank}, carriers=Carriers(device=comm, host=host))
        host.close()
        return got["x"].tolist(), wrong, comm.stats().calls > before

    for got, wrong, moved in world.run(rank_of):
        assert got == [0, 0] and isinstance(wrong, InputsDifferError) and moved


def test_the_description_names_all_that_must_agree() -> None:
    lines = describe({"a": torch.zeros(2, 3), "b": {"c": [1, None]}, "d": [], "e": torch.float16})
    assert lines == [
        "a: torch.float32 tensor (2, 3) on cpu",
        "b['c'][0]: 1",
        "b['c'][1]: None",
        "d: []",
        "e: torch.float16",
    ]


@pytest.mark.parametrize("memory", [24 << 30, 80 << 30, 85_000_000_000, 141 << 30])
def test_gpus_of_one_kind_set_as_much_aside_for_results(memory: int) -> None:
    """What the driver keeps for itself differs by some MiB; a rank that set other bytes aside would be refused."""
    assert results_bytes(memory) == results_bytes(memory - (64 << 20))
    assert memory / 128 < results_bytes(memory) <= memory / 64


def test_a_communicator_goes_without_devices(world: LocalWorld, tiny: Callable[..., Any]) -> None:
    model, comm = tiny("flux").model, world.communicators[0]
    with pytest.raises(ConfigError, match="got both"):
        parallelize(model, devices=2, communicator=comm)
    with pytest.raises(ConfigError, match="needs a purlin_core Communicator; got str"):
        parallelize(model, communicator="nccl")  # type: ignore[arg-type]
    with pytest.raises(NotBuiltError, match='text="root"'):
        parallelize(model, ParallelConfig(text="root"), communicator=comm)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_what_one_rank_meets_in_a_callback_is_raised_on_all_and_the_next_picture_is_right(
    world: LocalWorld, step: int
) -> None:
    """Amid the steps, and after the last of them, when nobody calls the denoiser any more."""
    pipes = [flux.tiny() for _ in range(RANKS)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    one = drawn(pipes[0])

    def rank_of(comm: Communicator) -> Any:
        torch.set_num_threads(1)

        def callback(_pipe: Any, at: int, _time: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if comm.rank == 1 and at == step:
                raise KeyError("out of glue")
            return kept

        handle = parallelize(pipes[comm.rank], communicator=comm)
        met = caught(drawn, pipe=pipes[comm.rank], callback_on_step_end=callback)
        after = [drawn(pipes[comm.rank]) for _ in range(2)]
        handle.undo()
        return met, after

    for rank, (met, after) in enumerate(world.run(rank_of)):
        assert type(met) is (KeyError if rank == 1 else InputsDifferError), (rank, met)
        assert rank == 1 or "rank 1 has an error: KeyError: 'out of glue'" in str(met), met
        assert all((out - one).abs().max() <= 1e-4 for out in after)


def test_a_rank_that_leaves_a_picture_before_its_steps_is_named_on_the_others_and_the_next_picture_is_right(
    world: LocalWorld,
) -> None:
    """It goes on to its next picture, where it waits for them."""
    pipes = [flux.tiny() for _ in range(RANKS)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    one = drawn(pipes[0])

    def rank_of(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        pipe = pipes[comm.rank]
        handle = parallelize(pipe, communicator=comm)
        met = caught(drawn, pipe=pipe, prompt=5) if comm.rank == 1 else caught(drawn, pipe=pipe)
        after = [drawn(pipe) for _ in range(2)]
        handle.undo()
        return met, after

    for rank, (met, after) in enumerate(world.run(rank_of)):
        assert type(met) is (ValueError if rank == 1 else InputsDifferError), (rank, met)
        assert rank == 1 or "rank 1 left picture 1 before its steps began" in str(met), met
        assert all((out - one).abs().max() <= 1e-4 for out in after)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error", [UnspeakableError(), ValueError("\udc80")], ids=["no text", "no text that can be encoded"]
)
def test_an_exception_that_cannot_be_told_is_told_by_its_type(world: LocalWorld, error: Exception) -> None:
    pipes = [flux.tiny() for _ in range(RANKS)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)

    def rank_of(comm: Communicator) -> Any:
        torch.set_num_threads(1)

        def callback(_pipe: Any, _at: int, _time: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if comm.rank == 1:
                raise error
            return kept

        handle = parallelize(pipes[comm.rank], communicator=comm)
        met = caught(drawn, pipe=pipes[comm.rank], callback_on_step_end=callback)
        drawn(pipes[comm.rank])
        handle.undo()
        return met

    for rank, met in enumerate(world.run(rank_of)):
        assert met is error if rank == 1 else f"an error: {type(error).__name__}" in str(met), (rank, met)


def test_where_there_are_no_more_calls_the_next_one_says_the_cure(world: LocalWorld) -> None:
    """An exception within the denoiser, amid exchanges that others wait in."""
    pipes = [flux.tiny() for _ in range(RANKS)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    def rank_of(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        pipe = pipes[comm.rank]
        handle = parallelize(pipe, communicator=comm)
        hook = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(fails) if comm.rank == 1 else None
        met = caught(drawn, pipe=pipe)
        if hook is not None:
            hook.remove()
        again = caught(drawn, pipe=pipe)
        handle.undo()
        return met, again

    for rank, (met, again) in enumerate(world.run(rank_of)):
        assert type(met) is (MemoryError if rank == 1 else PeerError), (rank, met)
        assert type(again) is PeerError and "undo() and parallelize again" in str(again), (rank, again)


def drawn(pipe: Any, prompt: Any = "an oak", **changes: Any) -> Tensor:
    call = {"height": 48, "width": 80, "num_inference_steps": 3, "max_sequence_length": 31, "output_type": "latent"}
    latents: Tensor = pipe(prompt, generator=torch.Generator().manual_seed(0), **call, **changes).images
    return latents
