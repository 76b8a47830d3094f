"""Keys exchanged in two parts, heads by heads: each head's attention, the bytes, the graphs and the failures are those of one part; and the order of
streams, with streams that are told and not run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from purlin_core import Communicator, LocalWorld, PeerError, Spec
from purlin_diffusion import ParallelConfig, RankError, parallelize, route
from purlin_diffusion import beside as beside_module
from purlin_diffusion.attention.layout import parse_layout
from purlin_diffusion.attention.sharded import sharded_attention
from purlin_diffusion.attention.task import DISPATCH, TORCH, Form
from purlin_diffusion.beside import BLOCKS, LEAST_BYTES, Beside, beside, beside_of
from purlin_diffusion.compiled import Sharding, running
from tests.diffusion.conftest import TOLERANCE
from tests.diffusion.test_attention import WIDTH, Case, divided, noise
from tests.diffusion.test_compile import SIZES, Graphs, blocks, counted, deep

WORLDS = (2, 3, 4)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, LocalWorld]]:
    made = {ranks: LocalWorld(ranks) for ranks in WORLDS}
    yield made
    for world in made.values():
        world.close()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def in_two(comm: Communicator) -> Beside:
    return Beside(comm, 0, None)


# ---- what is computed and moved --------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", [DISPATCH, TORCH], ids=["dispatch", "torch"])
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(("heads", "groups"), [(5, 5), (2, 2), (1, 1), (6, 3), (10, 5), (4, 1)])
def test_heads_of_any_count_are_bitwise(
    worlds: dict[int, LocalWorld], heads: int, groups: int, ranks: int, form: Form
) -> None:
    case = Case(worlds[ranks], "gather_kv", form=form, heads=heads, carrier=in_two)
    case.groups = groups
    case.check()


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    ("layout", "rest"), [("image@", 0), ("image@ -> image@ *", 6), ("image@ *", 3), ("text image@", 0)]
)
def test_every_layout_is_bitwise(worlds: dict[int, LocalWorld], layout: str, rest: int, ranks: int) -> None:
    Case(worlds[ranks], "gather_kv", layout=layout, rest=rest, carrier=in_two).check()


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("shape", ["1 1 1 k", "b 1 q k", "b h q k", "1 h 1 k", "h q k", "q k"])
def test_whole_masks_are_bitwise(worlds: dict[int, LocalWorld], shape: str, ranks: int) -> None:
    sizes = {"b": 2, "h": 6, "q": 25, "k": 25, "1": 1}
    case = Case(worlds[ranks], "gather_kv", form=TORCH, heads=6, carrier=in_two)
    case.groups = 3
    case.check(noise(*(sizes[dim] for dim in shape.split()), seed=7))


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    ("shape", "keys"), [((2, 1, 1, 25), True), ((2, 5, 1, 25), True), ((2, 5, 25, 25), True), ((2, 5, 25, 25), False)]
)
def test_a_mask_travels_with_its_tokens(
    worlds: dict[int, LocalWorld], shape: tuple[int, ...], keys: bool, ranks: int
) -> None:
    case = Case(worlds[ranks], "gather_kv", carrier=in_two)
    dim = -1 if keys else -2
    case.check(noise(*shape, seed=7), lambda mask, rank, division: case.rows(mask, rank, division, keys=keys, dim=dim))


def gathered(carrier: Any, mask: Tensor | None = None, heads: int = 5) -> Tensor:
    """torch's own f32 attention of a rank's 25 image tokens, uneven on most worlds."""
    division = divided(carrier.ranks, image=25)
    first = division.first("image", carrier.rank)
    rows = slice(first, first + division.local("image", carrier.rank))
    q, k, v = (noise(2, heads, 25, WIDTH, seed=i)[:, :, rows] for i in range(3))
    return sharded_attention(
        q,
        k,
        v,
        None if mask is None else mask[..., rows],
        parse_layout("image@"),
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        sharding=Sharding(carrier, division, "gather_kv"),
        form=TORCH,
    )


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("heads", [0, 1, 5])  # of the mask; 0: none
def test_results_and_bytes_are_those_of_one_part(worlds: dict[int, LocalWorld], heads: int, ranks: int) -> None:
    mask = noise(2, heads, 1, 25, seed=7) if heads else None

    def work(comm: Communicator) -> tuple[bool, int, list[int]]:
        outs, stats = [], [comm.stats()]
        for carrier in (comm, in_two(comm)):
            outs.append(gathered(carrier, mask))
            stats.append(comm.stats())
        calls = [after.calls - before.calls for before, after in pairwise(stats)]
        sent = [after.sent_bytes - before.sent_bytes for before, after in pairwise(stats)]
        return torch.equal(*outs), sent[1] - sent[0], calls

    assert worlds[ranks].run(work) == [(True, 0, [1, 2 + (heads > 0)])] * ranks


# ---- when it is done -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", WORLDS)
def test_all_ranks_decide_alike_by_what_would_be_a_ranks_share(worlds: dict[int, LocalWorld], ranks: int) -> None:
    share = 2 * 25 * 5 * 2 * WIDTH * 4 // ranks  # batch, tokens, heads, k and v, bytes

    def calls(comm: Communicator, least_bytes: int, heads: int) -> int:
        before = comm.stats().calls
        gathered(Beside(comm, least_bytes, None), heads=heads)
        return comm.stats().calls - before

    for least, heads, wanted in ((share, 5, 2), (share + 1, 5, 1), (0, 1, 1), (0, 2, 2)):
        assert worlds[ranks].run(lambda comm, least=least, heads=heads: calls(comm, least, heads)) == [wanted] * ranks


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_auto_is_for_ranks_with_a_gpu_each(
    worlds: dict[int, LocalWorld], gpu: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm: Any = worlds[2].communicators[0]
    monkeypatch.setattr(beside_module, "_side_device", lambda _: torch.device("cuda", 1) if gpu else None)
    assert beside(comm, False, apart=apart) is comm
    auto, always = beside(comm, "auto", apart=apart), beside_of(beside(comm, True, apart=apart))
    assert always is not None and always.least_bytes == 0
    if gpu and apart:
        assert isinstance(auto, Beside) and auto.least_bytes == LEAST_BYTES
        assert "the second beside attention, from 4 MiB" in auto.how
    else:
        assert auto is comm


def test_one_rank_has_nothing_to_exchange() -> None:
    with LocalWorld(1) as world:
        (comm,) = world.communicators
        assert beside(comm, True, apart=True) is comm


@pytest.mark.parametrize("backend", ["purlin", "torch"])
@pytest.mark.parametrize("family", ["flux", "sd3", "qwenimage"])
def test_pictures_are_those_of_one_part(tiny: Callable[..., Any], family: str, backend: Any) -> None:
    case = tiny(family)
    outs, texts = [], []
    for overlap in (False, True):
        handle = parallelize(
            case.model, ParallelConfig(attention="gather_kv", backend=backend, overlap=overlap), devices=3
        )
        outs.append(case.run())
        texts.append(handle.explain())
        handle.undo()
    assert torch.equal(*outs)
    assert ["in two parts" in text for text in texts] == [False, True]


# ---- compiled --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["flux", "sd3", "qwenimage"])
def test_compiled_it_has_as_many_graphs_and_is_what_eager_is(tiny: Callable[..., Any], family: str) -> None:
    case, counts = tiny(family), []
    for overlap in (False, True):
        torch._dynamo.reset()
        handle = parallelize(case.model, ParallelConfig(attention="gather_kv", overlap=overlap), devices=2)
        eager, graphs = case.run(), Graphs()
        blocks(case.model, backend=graphs)
        assert all(torch.equal(case.run(), eager) for _ in range(2))
        counts.append(graphs.count)
        handle.undo()
        for module in case.model.modules():
            module._compiled_call_impl = None
    assert counts[0] == counts[1] and not counters["graph_break"]


def test_a_bound_that_sizes_cross_costs_a_graph_for_each_kind_of_block_and_each_rank_at_most(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ranks, least_bytes = deep(1, 1), 2, 8000  # the last of the sizes has fewer
    cases = [tiny("flux", **size) for size in (SIZES[1], {"text": 3, "rows": 3, "columns": 3})]
    wanted, counts = [case.run(model) for case in cases], []
    for least in (None, least_bytes):
        torch._dynamo.reset()
        graphs, twin = Graphs(), copy.deepcopy(model)
        made = lambda carrier, *_, least=least, **__: carrier if least is None else Beside(carrier, least, None)  # noqa: E731
        monkeypatch.setattr(route, "beside", made)
        handle = parallelize(twin, devices=ranks)
        blocks(twin, backend=graphs)
        counts.append(counted(twin, graphs, cases, wanted)[-1])
        handle.undo()
    assert 0 <= counts[1] - counts[0] <= 2 * ranks, counts


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_compilers_make_is_right(tiny: Callable[..., Any], backend: str) -> None:
    case, model = tiny("flux"), deep(1, 1)
    one = case.run(model)
    handle = parallelize(model, ParallelConfig(overlap=True), devices=2)
    blocks(model, backend=backend)
    for _ in range(2):
        assert (case.run(model) - one).abs().max() <= TOLERANCE
    handle.undo()


class Echo:
    """Rank 0 of two that have the same."""

    rank, ranks = 0, 2

    def exchange(self, tensors: Sequence[Tensor], specs: Sequence[str], *, sizes: Any = None) -> list[Tensor]:
        return [Spec.parse(spec).reference([x, x], sizes=sizes)[0] for x, spec in zip(tensors, specs, strict=True)]


class Layer:
    """One attention of five heads, as rank 0 of two computes it."""

    def __init__(self) -> None:
        carrier: Any = Echo()
        self.sharding = Sharding(Beside(carrier, 0, None), divided(2, image=24), "gather_kv")
        self.weights = [noise(40, 40, seed=i) for i in range(3)]
        self.layout = parse_layout("image@")

    def __call__(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (5, WIDTH)) for w in self.weights)
        out = sharded_attention(
            q.tanh(), k.tanh(), v, None, self.layout, self.attend, sharding=self.sharding, form=DISPATCH
        )
        return out.flatten(2) + x.relu()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2)

    def compiled(self, backend: Any) -> tuple[Tensor, list[str]]:
        """What it gives, and inductor's code."""
        x = noise(2, 12, 40, seed=9)
        with running(self.sharding), torch.no_grad():
            got, code = run_and_get_code(torch.compile(self.__call__, backend=backend, fullgraph=True), x)
            assert (got - self(x)).abs().max() <= TOLERANCE
        return got, code


def behind(node: torch.fx.Node) -> set[torch.fx.Node]:
    """All that a node needs."""
    needs = set(node.all_input_nodes)
    return needs.union(*map(behind, needs))


def test_what_comes_first_a_graph_says_by_what_its_nodes_read() -> None:
    """A compiler may take any order that these leave."""
    graphs: list[torch.fx.Graph] = []

    def look(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    Layer().compiled(aot_autograd(fw_compiler=look))
    (graph,) = graphs

    def nodes(name: str) -> list[torch.fx.Node]:
        return [node for node in graph.nodes if name in f"{node.target} {node.args[:1]}" and node.op != "output"]

    starts = [node for node in nodes("exchange_beside") if "functionalized" in str(node.target)]
    arrivals, attentions = nodes("arrived.default"), nodes("scaled_dot_product")
    (first, second), (early, late) = starts, arrivals
    assert first in behind(second) and {first, second} <= behind(early)
    assert len([node for node in behind(early) if node in nodes("tanh")]) == 2  # queries too
    assert attentions[0] in behind(late) and attentions[0] not in behind(early)
    assert all(second in behind(lent) for node in arrivals for lent in node.args[1])  # so that nobody else writes there


def test_inductor_copies_nothing_and_keeps_what_a_peer_still_reads() -> None:
    """The buffers that are exchanged are those that `arrived` reads, and nothing else is put there before."""
    _, (code,) = Layer().compiled("inductor")
    calls = re.findall(r"ops\.(?:purlin_diffusion\.(\w+)|aten\.(_scaled\w+))\.default\(", code)
    attention = next(name for _, name in calls if name)
    names = [mine or theirs for mine, theirs in calls]
    assert names == ["exchange_beside"] * 2 + ["arrived", attention] * 2
    lent = re.findall(r"(?:exchange_beside|arrived)\.default\((?:\w+, )?\[(.*?)\], \d", code)
    assert len(lent) == 4 and len(set(lent)) == 1, lent
    _, *between = code[code.index("exchange_beside.default(") : code.rindex("arrived.default(")].split("\n")
    others = "\n".join(line for line in between if "purlin_diffusion" not in line)
    assert not any(re.search(rf"\b{buffer}\b", others) for buffer in re.findall(r"buf\d+", lent[0]))
    assert "clone" not in others and "copy" not in others


# ---- what goes wrong -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_fails_in_the_second_exchange_is_named_and_the_next_call_works(
    tiny: Callable[..., Any], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, ParallelConfig(attention="gather_kv", overlap=True, timeout=20), devices=3)
    one = case.run()
    failing: Any = handle.sessions[0].carriers[rank]
    start, started = failing.start, []

    def fails(*args: Any, **kwargs: Any) -> Any:
        started.append(1)
        if len(started) == 4:  # the second layer's second
            raise RuntimeError("out of glue")
        return start(*args, **kwargs)

    monkeypatch.setattr(failing, "start", fails)
    with pytest.raises(RuntimeError, match="out of glue") as caught:
        case.run()
    assert rank == 0 or (isinstance(caught.value, RankError) and caught.value.rank == rank)
    assert torch.equal(case.run(), one)
    handle.undo()


def test_a_peer_that_leaves_between_is_told() -> None:
    def work(comm: Communicator) -> str:
        with comm.guard():
            if comm.rank == 1:
                comm.exchange([torch.zeros(2, 1, 2, WIDTH)] * 2, ["b s@ h d -> b s h d", "b s@ h e -> b s h e"])
                raise RuntimeError("out of glue")
            try:
                division = divided(2, s=2)
                x = torch.zeros(2, 1, 8, WIDTH)
                sharding = Sharding(in_two(comm), division, "gather_kv")
                sharded_attention(x, x, x, None, parse_layout("s@"), lambda q, *_: q, sharding=sharding)
            except PeerError as error:
                return str(error)
        return "no error"

    with LocalWorld(2, timeout=20) as world, pytest.raises(RuntimeError, match="out of glue"):
        world.run(work)


# ---- streams ---------------------------------------------------------------------------------------------------------
class Told:
    """What streams of one GPU were told, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = self.main = Stream("main", self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "Stream", self.made)

    def made(self, device: torch.device, *, priority: int) -> Stream:
        assert priority < 0
        self.log.append(f"made on {device}")
        return Stream("side", self)

    def on(self, stream: Stream) -> Stream:
        return stream


class Stream:
    def __init__(self, name: str, told: Told) -> None:
        self.name, self.told, self.before = name, told, self

    def wait_stream(self, other: Stream) -> None:
        self.told.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.told.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"{self.told.log[-1]}"

    def __enter__(self) -> None:
        self.before, self.told.current = self.told.current, self

    def __exit__(self, *_: object) -> None:
        self.told.current = self.before


class Numbered:
    """A carrier that notes on which stream it exchanges."""

    rank, ranks = 0, 2

    def __init__(self, told: Told) -> None:
        self.told, self.calls, self.few = told, 0, ""

    def exchange(self, tensors: Sequence[Tensor], *_: Any, **__: Any) -> list[Tensor]:
        self.calls += 1
        self.told.log.append(f"{self.calls} on {self.told.current.name}{self.few}")
        return list(tensors)

    @contextmanager
    def budget(self, blocks: int) -> Iterator[None]:
        self.few = f", {blocks} blocks"
        yield
        self.few = ""


def test_what_moves_waits_for_what_was_launched_who_reads_waits_for_it_and_the_second_takes_few_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch)
    carrier: Any = Numbered(told)
    side = Beside(carrier, 0, torch.device("cuda", 1))
    x = torch.ones(2)
    moving = [side.start([x], ["n@ -> n"]) for _ in range(2)]
    for each in moving:
        assert side.arrived(each)[0] is x and each.inputs[0] is x  # kept until then
        told.log.append("attention")
    assert told.log == [
        "made on cuda:1",
        *("side waits for main", "1 on side", "side waits for main", f"2 on side, {BLOCKS} blocks"),
        *("main waits for 1 on side", "attention", f"main waits for 2 on side, {BLOCKS} blocks", "attention"),
    ]
    assert told.current is told.main


def test_two_exchanges_never_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    carrier: Any = Numbered(told)
    side = Beside(carrier, 0, torch.device("cuda", 1))
    x = torch.ones(2)
    moving = [side.start([x], ["n@ -> n"]) for _ in range(2)]
    side.exchange([x], ["n@ -> n"])
    for each in moving:
        side.arrived(each)
    side.redistribute(x, "n@ -> n")
    assert told.log[5:] == [
        *(f"main waits for 2 on side, {BLOCKS} blocks", "3 on main"),
        *("main waits for 1 on side", f"main waits for 2 on side, {BLOCKS} blocks", "4 on main"),
    ]


def test_after_a_failure_the_streams_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    carrier: Any = Numbered(told)
    side = Beside(carrier, 0, torch.device("cuda", 1))

    def fail() -> None:
        with running(Sharding(side, divided(2, n=2), "gather_kv")):
            side.start([torch.ones(2)], ["n@ -> n"])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert told.log[-1] == "main waits for side"
