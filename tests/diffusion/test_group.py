"""Ranks that each hold their model, as processes do: here threads with a communicator of their own. Inputs come from the root."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
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
@pytest.mark.parametrize("family", ["flux", "sd3", "qwenimage"])
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
