"""torch.compile under parallelize: as many graphs as the plain model has, no breaks, the same output, whatever was compiled and when."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from purlin_core import ClosedError, Communicator, LocalWorld
from purlin_diffusion import ParallelConfig, PlacementError, parallelize
from purlin_diffusion.compiler import FORCE
from purlin_diffusion.workers import Worker

TOLERANCE = 1e-5
SIZES: list[dict[str, int]] = [{}, {}, {"text": 17, "rows": 7}, {"text": 9, "columns": 9}]


class Graphs:
    """A backend that counts what it compiles, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graphs of another test, and no lines for torch's own trace viewer, which take longer than compiling."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def deep(double: int, single: int) -> nn.Module:
    """A FLUX of `double` + `single` blocks of 32 channels."""
    from tests.diffusion.conftest import weighted

    return weighted(
        diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        )
    )


def blocks(model: Any, **options: Any) -> Any:
    model.compile_repeated_blocks(fullgraph=True, **options)
    return model


def in_place(model: Any, **options: Any) -> Any:
    model.compile(fullgraph=True, **options)
    return model


def wrapped(model: Any, **options: Any) -> Any:
    return torch.compile(model, fullgraph=True, **options)


def counted(model: Any, graphs: Graphs, cases: list[Any], wanted: list[Tensor]) -> list[int]:
    """Graphs there are after a call of each case, each of which is right."""
    counts = []
    for case, one in zip(cases, wanted, strict=True):
        assert (call(case, model) - one).abs().max() <= TOLERANCE
        counts.append(graphs.count)
    return counts


def call(case: Any, model: Any) -> Tensor:
    out: Tensor = case.run(model)
    return out


@pytest.mark.parametrize(
    ("how", "when", "each", "sizes"),
    [(blocks, "after", 12, SIZES), (in_place, "before", 1, SIZES), (wrapped, "before", 1, SIZES[:2])],
)
def test_there_are_as_many_graphs_as_the_plain_model_has(
    tiny: Callable[..., Any], how: Callable[..., Any], when: str, each: int, sizes: list[dict[str, int]]
) -> None:
    """And one at most more a rank, in the first call, the next, and when only sizes change: 24 blocks, or a whole model.

    Text of odd length, uneven shares.
    """
    model, ranks = deep(each, each), 2
    cases = [tiny("flux", **size) for size in sizes]
    wanted = [call(case, model) for case in cases]
    plain = Graphs()
    most = counted(how(copy.deepcopy(model), backend=plain), plain, cases, wanted)
    torch._dynamo.reset()

    ours = Graphs()
    if when == "before":
        model = how(model, backend=ours)
    handle = parallelize(model, devices=ranks)
    if when == "after":
        model = how(model, backend=ours)
    counts = counted(model, ours, cases, wanted)
    assert all(ours <= ranks * (plain + 1) for ours, plain in zip(counts, most, strict=True)), (counts, most)
    assert all(first == again for first, again in zip(counts[::2], counts[1::2], strict=True))
    assert not counters["graph_break"]
    handle.undo()


@pytest.mark.parametrize(
    ("family", "mode", "backend"),
    [("flux", "ulysses", "torch"), ("sd3", "gather_kv", "purlin"), ("qwenimage", "ulysses", "purlin")],
)
def test_every_family_mode_and_carrier_compiles(tiny: Callable[..., Any], family: str, mode: str, backend: str) -> None:
    """SD3 too, of which diffusers does not know the blocks: while it is parallel, its plan names them."""
    case = tiny(family)
    model, one = case.model, case.run()
    ranks = 2
    handle = parallelize(model, ParallelConfig(attention=mode, backend=backend), devices=ranks)
    graphs = Graphs()
    blocks(model, backend=graphs)
    for _ in range(2):
        assert (case.run() - one).abs().max() <= TOLERANCE
    assert ranks <= graphs.count <= 4 * ranks and not counters["graph_break"]
    handle.undo()
    assert torch.equal(case.run(), one)
    if family == "sd3":
        with pytest.raises(ValueError, match="_repeated_blocks"):
            model.compile_repeated_blocks()


def test_a_whole_sd3_measures_its_image_inside_the_graph(tiny: Callable[..., Any]) -> None:
    case = tiny("sd3")
    graphs = Graphs()
    handle = parallelize(case.model, ParallelConfig(cfg=1), devices=2)
    in_place(case.model, backend=graphs)
    sized = tiny("sd3", **SIZES[2])
    assert (call(sized, case.model) - sized.run()).abs().max() <= TOLERANCE
    held = [counters_.tokens["image"] for counters_ in handle.counters]
    assert sum(held) > 0 and max(held) - min(held) <= 3
    assert not counters["graph_break"]
    handle.undo()


def test_ranks_with_a_communicator_of_their_own_compile(tiny: Callable[..., Any]) -> None:
    """As processes do; uneven shares on three ranks."""
    cases, model = [tiny("flux")] * 2, deep(1, 1)
    wanted = [call(case, model) for case in cases]
    models = [copy.deepcopy(model) for _ in range(3)]

    def work(comm: Communicator) -> None:
        with torch._dynamo.config.patch(recompile_limit=64):  # of one process, which has three ranks here
            mine = models[comm.rank]
            handle = parallelize(mine, communicator=comm)
            counted(blocks(mine, backend="eager"), Graphs(), cases, wanted)
            handle.undo()

    with LocalWorld(3, timeout=120) as world:
        world.run(work)
    assert not counters["graph_break"]


def test_undo_gives_back_the_compiled_model_there_was(tiny: Callable[..., Any]) -> None:
    """Its graphs too: nothing is compiled again."""
    case, model, graphs = tiny("flux"), deep(1, 1), Graphs()
    blocks(model, backend=graphs)
    one, before = call(case, model), graphs.count
    handle = parallelize(model, devices=2)
    assert (call(case, model) - one).abs().max() <= TOLERANCE
    during = graphs.count
    assert during > before
    handle.undo()
    assert torch.equal(call(case, model), one) and graphs.count == during


def test_undo_and_once_more_finds_the_graphs_of_before(tiny: Callable[..., Any]) -> None:
    """Of the root; another handle's replicas are new."""
    case, model, graphs = tiny("flux"), deep(1, 1), Graphs()
    blocks(model, backend=graphs)
    one, counts = call(case, model), []
    for _ in range(3):
        handle = parallelize(model, devices=1)
        assert (call(case, model) - one).abs().max() <= TOLERANCE
        counts.append(graphs.count)
        handle.undo()
    assert counts[0] == counts[2]


@pytest.mark.parametrize("name", ["native", "_native_math"])
def test_attention_backends_keep_working(tiny: Callable[..., Any], name: str) -> None:
    case, model = tiny("flux"), deep(1, 1)
    model.set_attention_backend(name)  # type: ignore[operator]
    one = call(case, model)
    handle = parallelize(model, devices=2)
    blocks(model, backend="aot_eager")
    assert (call(case, model) - one).abs().max() <= TOLERANCE
    assert not counters["graph_break"] and handle.stats[0].calls >= 2
    handle.undo()


def test_what_inductor_makes_is_right(tiny: Callable[..., Any]) -> None:
    """With the mode whose graphs a GPU has, and which on a CPU is compiled like any other."""
    case, model = tiny("flux"), deep(1, 1)
    one = call(case, model)
    handle = parallelize(model, devices=2)
    blocks(model, mode="reduce-overhead")
    for _ in range(2):
        assert (call(case, model) - one).abs().max() <= TOLERANCE
    handle.undo()


def test_replicas_that_cannot_follow_are_named(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    case.model.transformer_blocks[0]._compiled_call_impl = print
    with pytest.raises(
        PlacementError, match=r"FluxTransformerBlock is compiled in a way that a replica cannot follow.*torchrun"
    ):
        parallelize(case.model, devices=2)
    del case.model.transformer_blocks[0]._compiled_call_impl
    assert case.run().isfinite().all()


def test_settings_of_torch_reach_the_threads_of_ranks() -> None:
    """torch keeps them a context, and a thread would begin with none."""
    worker = Worker("purlin-test")
    with torch._dynamo.config.patch(recompile_limit=77):
        assert worker.run(lambda: torch._dynamo.config.recompile_limit).result(5) == 77
    worker.close()


@pytest.mark.skipif(
    not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"), reason="this torch says it to the thread that traces"
)
def test_compiled_ranks_run_while_something_is_traced(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another rank's graph is, when that rank compiles: torch.fx says so to all threads of a process."""
    case, model, graphs = tiny("flux"), deep(1, 1), Graphs()
    one = call(case, model)
    handle = parallelize(model, ParallelConfig(timeout=20), devices=2)
    blocks(model, backend=graphs)
    assert (call(case, model) - one).abs().max() <= TOLERANCE
    compiled = graphs.count
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    assert (call(case, model) - one).abs().max() <= TOLERANCE
    monkeypatch.undo()
    assert graphs.count == compiled and not counters["graph_break"]
    handle.undo()


@pytest.mark.skipif(not hasattr(torch._dynamo.config, FORCE), reason="this torch has no such setting")
@pytest.mark.parametrize(("compiled", "ranks"), [(True, 2), (False, 2), (True, 1)])
def test_the_setting_is_changed_for_ranks_that_compile_beside_others_and_only_while_they_run(
    tiny: Callable[..., Any], compiled: bool, ranks: int
) -> None:
    case, seen = tiny("flux"), set[Any]()
    handle = parallelize(case.model, devices=ranks)
    if compiled:
        case.model.norm_out.compile(backend="eager")
    case.model.transformer_blocks[0].register_forward_hook(lambda *_: seen.add(getattr(torch._dynamo.config, FORCE)))
    case.run()
    assert seen == {compiled and ranks > 1} and not getattr(torch._dynamo.config, FORCE)
    handle.undo()


def test_code_compiled_around_the_model_is_named(tiny: Callable[..., Any]) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    step = torch.compile(lambda: case.model(**case.inputs, return_dict=False)[0] + 1, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Compile the model, and nothing around it"), torch.no_grad():
        step()
    handle.undo()


def test_an_exchange_outside_of_a_forward_is_named() -> None:
    with pytest.raises(ClosedError, match="runs outside of its model"):
        torch.ops.purlin_diffusion.exchange([torch.ones(2)], ["n@ -> n"], [], [], 0, 1)
