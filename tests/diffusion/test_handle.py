"""parallelize and its handle: refusals come first and by name, undo gives the model back, errors of ranks surface, threads end."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from purlin_diffusion import (
    AlreadyParallelError,
    ArgumentError,
    ConfigError,
    ParallelConfig,
    PlacementError,
    RankError,
    UnsupportedModelError,
    parallelize,
    placement,
    supported,
)
from purlin_diffusion.report import step_bytes

MODES = ("gather_kv", "ulysses")
FAMILIES = ("flux", "sd3", "qwenimage")


def attributes(model: nn.Module) -> dict[str, Any]:
    """All that is on the modules and processors of a model."""
    facts: dict[str, Any] = {}
    for name, module in model.named_modules():
        facts[name] = {key: id(value) for key, value in module.__dict__.items() if key != "forward"} | {
            "forward": "forward" in module.__dict__
        }
        facts[name + ".processor"] = type(getattr(module, "processor", None))
    return facts


def backends() -> dict[Any, Any]:
    return dict(_AttentionBackendRegistry._backends)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_gives_the_model_back(tiny: Callable[..., Any], family: str, ranks: int) -> None:
    gc.collect()  # models that other tests dropped without undo
    case = tiny(family)
    before, entries, one = attributes(case.model), backends(), case.run()
    handle = parallelize(case.model, devices=ranks)
    case.run()
    assert attributes(case.model) != before
    handle.undo()
    handle.undo()
    assert attributes(case.model) == before and backends() == entries
    assert torch.equal(case.run(), one)
    parallelize(case.model, devices=2).undo()


def test_the_registry_is_plain_again_when_the_last_model_is(tiny: Callable[..., Any]) -> None:
    gc.collect()  # models that other tests dropped without undo
    entries = backends()
    parallelize(tiny("flux").model, devices=2)
    gc.collect()
    assert backends() == entries
    handles = [parallelize(tiny(family).model, devices=2) for family in FAMILIES]
    for handle in handles:
        assert backends() != entries
        handle.undo()
    assert backends() == entries


def test_a_hook_put_on_afterwards_survives_undo(tiny: Callable[..., Any]) -> None:
    class Twice(diffusers.hooks.ModelHook):
        def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (2 * self.fn_ref.original_forward(*args, **kwargs)[0],)

    case = tiny("flux")
    one = case.run()
    handle = parallelize(case.model, devices=2)
    diffusers.hooks.HookRegistry.check_if_exists_or_initialize(case.model).register_hook(Twice(), "twice")
    assert torch.allclose(case.run(), 2 * one, atol=1e-5)
    handle.undo()
    assert torch.equal(case.run(), 2 * one)


def test_a_second_parallelize_is_named(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    with pytest.raises(AlreadyParallelError, match=r"undo\(\)"):
        parallelize(case.model, devices=2)
    assert case.run().isfinite().all()
    handle.undo()
    parallelize(case.model, devices=2).undo()


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), object(), diffusers.FlowMatchEulerDiscreteScheduler()])
def test_an_unsupported_model_lists_what_is_supported(wrong: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parallelize(wrong, devices=2)
    assert all(name in str(caught.value) for name in supported())


def test_a_subclass_with_a_forward_of_its_own_is_unsupported(tiny: Callable[..., Any]) -> None:
    model = tiny("flux").model

    class Mine(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Renamed(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = Mine
    with pytest.raises(UnsupportedModelError, match="overrides the forward of FluxTransformer2DModel"):
        parallelize(model, devices=2)
    model.__class__ = Renamed
    parallelize(model, devices=2).undo()


@pytest.mark.parametrize(
    ("devices", "error", "text"),
    [
        (0, ConfigError, "count of 1 or more"),
        ([], ConfigError, "count of 1 or more"),
        (True, ConfigError, "count of 1 or more"),
        (17, ConfigError, "at most 16"),
        (range(10**9), ConfigError, "at most 16"),
        (10**9, ConfigError, "at most 16"),
        (["cuda:0", "cuda:1"], PlacementError, "the first of `devices`"),
        (["cpu", "cuda:0"], ConfigError, r"of one type.*devices=\['cpu'\] \* 2"),
    ],
)
def test_wrong_devices_are_named(
    tiny: Callable[..., Any], devices: Any, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(error, match=text):
        parallelize(tiny("flux").model, devices=devices)


@pytest.mark.parametrize(
    ("devices", "came", "cure"),
    [
        (["cuda"], "GPUs that torch sees, 0; got 'cuda'", "devices=2"),
        (["cpu", "cuda:0"], "GPUs that torch sees, 0; got 'cuda:0'", "devices=2"),
        (["meta", "meta"], "got 'meta'", "cpu and cuda only"),
        ([0, 1], "got 0 among them", "'cuda:0'"),
        (range(2), "got 0 among them", "'cuda:0'"),
        (["nonsense", "cpu"], "got 'nonsense' among them", "'cpu'"),
        (["cpu", None], "got None among them", "'cpu'"),
        ([["cpu"]], r"got \['cpu'\] among them", "'cpu'"),
        ("cpu", "got 'cpu', a single device", r"\['cpu'\] \* 2"),
        (torch.device("cpu"), "got 'cpu', a single device", r"\['cpu'\] \* 2"),
        (b"cpu", "got b'cpu'", "devices=2"),
        ({"cpu"}, r"got \{'cpu'\}", "devices=2"),
        (2.0, r"got 2\.0", "devices=2"),
        (torch.ones(2), r"got tensor", "devices=2"),
        (object(), "got <object object", "devices=2"),
    ],
)
def test_what_names_no_device_that_is_there_says_what_to_pass(
    tiny: Callable[..., Any], devices: Any, came: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    case = tiny("flux")
    before, one = attributes(case.model), case.run()
    with pytest.raises(ConfigError, match=f"`devices` needs .*{came}.*{cure}"):
        parallelize(case.model, devices=devices)
    assert attributes(case.model) == before
    assert torch.equal(case.run(), one)


def test_a_model_where_no_rank_can_compute_is_told_to_move(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "device_of", lambda _: torch.device("mps", 0))
    with pytest.raises(PlacementError, match=r"cpu, cuda.*got mps:0.*\.to\("):
        parallelize(tiny("flux").model)


@pytest.mark.parametrize("config", ["x", "", 3, 0, {}, False, ParallelConfig])
def test_a_config_of_another_kind_is_named(tiny: Callable[..., Any], config: Any) -> None:
    case = tiny("flux")
    before = attributes(case.model)
    with pytest.raises(ConfigError, match=r"`config` needs a ParallelConfig.*; got .*ParallelConfig\(attention="):
        parallelize(case.model, config, devices=2)
    assert attributes(case.model) == before


def test_a_spread_model_is_refused_with_advice(tiny: Callable[..., Any]) -> None:
    model = tiny("flux").model
    model.hf_device_map = {"": "cuda:0"}
    with pytest.raises(PlacementError, match=r"device map.*\.to\("):
        parallelize(model, devices=2)
    del model.hf_device_map
    model.proj_out.to("meta")
    with pytest.raises(PlacementError, match="one device"):
        parallelize(model, devices=2)


def test_hooks_that_a_replica_cannot_copy_are_refused(tiny: Callable[..., Any]) -> None:
    model = tiny("flux").model
    model.enable_cache(diffusers.FirstBlockCacheConfig())
    with pytest.raises(PlacementError, match="hooks that a replica cannot copy"):
        parallelize(model, devices=2)
    model.disable_cache()
    parallelize(model, devices=2).undo()


@pytest.mark.parametrize(
    ("passed", "text"),
    [
        ({"plywood": 1}, "unexpected keyword argument 'plywood'"),
        ({"joint_attention_kwargs": {"plywood": 1}}, r"does not know `joint_attention_kwargs\.plywood`"),
        (
            {"joint_attention_kwargs": {"ip_adapter_masks": 1}},
            r"`joint_attention_kwargs\.ip_adapter_masks` cannot be sharded",
        ),
    ],
)
def test_an_argument_that_is_refused_leaves_the_model_usable(
    tiny: Callable[..., Any], passed: dict[str, Any], text: str
) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    with pytest.raises(ArgumentError, match=text):
        case.run(**passed)
    assert case.run(joint_attention_kwargs={"ip_adapter_masks": None}).isfinite().all()
    handle.undo()


def test_a_pipeline_has_all_its_denoisers_made_parallel_or_none(tiny: Callable[..., Any]) -> None:
    first, second = tiny("flux"), tiny("sd3")
    pipe = SimpleNamespace(
        components={
            "transformer": first.model,
            "transformer_2": second.model,
            "vae": nn.Linear(2, 2),
            "image_encoder": None,
        }
    )
    ones = first.run(), second.run()
    handle = parallelize(pipe, devices=2)
    assert all((case.run() - one).abs().max() <= 1e-5 for case, one in zip((first, second), ones, strict=True))
    assert len(handle.counters) == 4 and handle.explain().count("exchanges  purlin") == 2
    handle.undo()
    before = attributes(first.model)
    pipe.components["transformer_2"] = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="no plan for `Linear`"):
        parallelize(pipe, devices=2)
    assert attributes(first.model) == before


def test_gradients_are_refused(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    with pytest.raises(ArgumentError, match="inference_mode"):
        case.model(**case.inputs)
    with torch.inference_mode():
        assert case.model(**case.inputs, return_dict=False)[0].is_inference()
    handle.undo()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_of_any_rank_surfaces_and_the_next_call_works(tiny: Callable[..., Any], rank: int) -> None:
    case = tiny("flux")
    one = case.run()
    handle = parallelize(case.model, ParallelConfig(timeout=30), devices=3)
    session = handle._sessions[0]
    model = case.model if rank == 0 else session._workers[rank - 1].sharded.model

    def fail(*_: Any) -> None:
        if (threading.current_thread() is threading.main_thread()) == (
            rank == 0
        ):  # a hook on the root's model goes to replicas, too
            raise RuntimeError("out of glue")

    hook = model.single_transformer_blocks[0].attn.to_q.register_forward_hook(fail)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="out of glue") as caught:
        case.run()
    assert time.monotonic() - began < 5
    if rank:
        assert (
            isinstance(caught.value, RankError)
            and caught.value.rank == rank
            and f"rank {rank} of 3" in str(caught.value)
        )
        assert isinstance(caught.value.__cause__, RuntimeError)
    hook.remove()
    assert (case.run() - one).abs().max() <= 1e-5
    handle.undo()
    assert torch.equal(case.run(), one)


@pytest.mark.parametrize("backend", ["purlin", "torch"])
def test_an_interrupt_ends_the_call_and_releases_the_ranks(tiny: Callable[..., Any], backend: str) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, ParallelConfig(timeout=60, backend=backend), devices=2)

    def interrupt(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    hook = case.model.transformer_blocks[1].register_forward_hook(interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        case.run()
    assert time.monotonic() - began < 10
    hook.remove()
    assert case.run().isfinite().all()
    handle.undo()


def rank_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("purlin-")}


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_end_with_undo_and_with_the_model(tiny: Callable[..., Any], family: str) -> None:
    before = rank_threads()
    case = tiny(family)
    handle = parallelize(case.model, devices=4)
    assert len(rank_threads() - before) == 3
    handle.undo()
    assert rank_threads() <= before

    del handle
    parallelize(case.model, devices=3)  # its handle is dropped: the model keeps the ranks
    gc.collect()
    assert len(rank_threads() - before) == 2 and case.run().isfinite().all()
    gone = weakref.ref(case.model)
    del case
    gc.collect()
    assert gone() is None and rank_threads() <= before


def test_ranks_share_the_cores_and_give_them_back(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    torch.set_num_threads(4)
    handle = parallelize(case.model, devices=2)
    seen: dict[threading.Thread, int] = {}
    case.model.norm_out.register_forward_hook(
        lambda *_: seen.update({threading.current_thread(): torch.get_num_threads()})
    )
    case.run()
    assert list(seen.values()) == [2, 2] and torch.get_num_threads() == 4
    handle.undo()
    with ThreadPoolExecutor(1) as pool:
        assert torch.get_num_threads() == 4 == pool.submit(torch.get_num_threads).result()


def test_tokens_are_counted_and_sum_to_the_whole(tiny: Callable[..., Any]) -> None:
    case = tiny("sd3")
    handle = parallelize(case.model, devices=3)
    for _ in range(2):
        case.run()
    assert [counters.calls for counters in handle.counters] == [2, 2, 2]
    for name, tokens in {"image": 35, "text": 11}.items():
        held = [counters.tokens[name] for counters in handle.counters]
        assert sum(held) == 2 * tokens and max(held) < 2 * tokens
    handle.undo()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["purlin", "torch"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_on_the_wire_equal_the_formula(
    tiny: Callable[..., Any], family: str, ranks: int, backend: str, mode: str
) -> None:
    case = tiny(family)
    handle = parallelize(case.model, ParallelConfig(attention=mode, backend=backend), devices=ranks)
    session = handle._sessions[0]
    assert step_bytes(session.sharded) is None and "none yet" in handle.explain()
    case.run()
    sent = [stats.sent_bytes for stats in handle.stats]
    assert step_bytes(session.sharded) == sent
    assert f"{sum(sent)} bytes = {sent} by rank" in handle.explain()
    handle.undo()


def test_the_route_is_said_in_one_visible_line(tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="purlin_diffusion"):
        handle = parallelize(tiny("flux").model, ParallelConfig(backend="torch"), devices=2)
    assert [record.getMessage() for record in caplog.records] == [f"purlin_diffusion: exchanges by {handle.route}"]
    assert "gloo" in handle.route and handle.route in handle.explain()
    assert (handle.rank, handle.ranks, handle.is_root) == (0, 2, True)
    handle.undo()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_undone_handle_explains_that_and_nothing_of_before(tiny: Callable[..., Any], ranks: int) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=ranks)
    case.run()
    handle.undo()
    case.run()  # no longer its own
    again = parallelize(case.model, devices=2)
    calls = f"1 call on {ranks} rank{'s' * (ranks > 1)}"
    text = f"is undone: it was given back as it was, after {calls}; this handle says no more of it"
    assert handle.explain() == f"FluxTransformer2DModel {text}" and "undone" in repr(handle)
    assert "FluxTransformer2DModel on 2 ranks" in again.explain()
    again.undo()


def test_auto_takes_the_mode_that_moves_less(tiny: Callable[..., Any]) -> None:
    for ranks, mode in ((2, "gather_kv"), (4, "gather_kv"), (5, "ulysses")):  # five heads
        handle = parallelize(tiny("flux").model, devices=ranks)
        assert f"attention={mode} (auto" in handle.explain()
        handle.undo()


def test_a_call_leaves_torch_the_attention_kernels_it_had(tiny: Callable[..., Any]) -> None:
    """Ranks that are threads choose kernels at once, and one may put back what another has chosen."""
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    turn_off = case.model.proj_out.register_forward_hook(lambda *_: torch.backends.cuda.enable_flash_sdp(False))
    case.run()
    assert torch.backends.cuda.flash_sdp_enabled()
    handle.undo()
    turn_off.remove()
