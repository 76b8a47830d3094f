"""sharded_attention is bitwise the attention of one rank on the same rows, whatever the world, mode, layout, mask, heads and strides.

torch's f32 attention on a CPU rounds by how many rows it is given, so the laws over all cases compute in f64 and round once; one test holds torch's
own against the same rows, or the same heads, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from purlin_core import Communicator, LocalWorld, ShapeError
from purlin_diffusion import PlanError, Segment
from purlin_diffusion.attention.layout import parse_calls, parse_layout
from purlin_diffusion.attention.sharded import sharded_attention
from purlin_diffusion.attention.task import DISPATCH, TORCH, Form
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.compiled import Sharding
from purlin_diffusion.cut import Stretch, stretch, take
from purlin_diffusion.segments import Division

MODES = ("gather_kv", "ulysses")
WORLDS = (1, 2, 3, 4, 7)
WIDTH = 8


@pytest.fixture(scope="module")
def worlds() -> dict[int, LocalWorld]:
    return {ranks: LocalWorld(ranks) for ranks in WORLDS}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def divided(ranks: int, **tokens: int) -> Division:
    division = Division([Segment(name) for name in tokens], ranks)
    for name, count in tokens.items():
        division.measure(name, count)
    return division


class Case:
    """One attention over text (4 or more tokens) and image tokens, and its rows on every rank."""

    def __init__(
        self,
        world: LocalWorld,
        mode: str,
        *,
        layout: str = "text@ image@",
        form: Form = DISPATCH,
        heads: int = 5,
        rest: int = 0,
        carrier: Callable[[Communicator], Carrier] = lambda comm: comm,
    ) -> None:
        self.carrier = carrier
        self.world, self.mode, self.form, self.layout = world, mode, form, parse_layout(layout)
        self.lengths = {"text": 9, "image": 16, "*": rest}
        self.heads, self.groups, self.batch = heads, heads, 2

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = (sum(self.lengths[p.name] for p in parts) for parts in (self.layout.queries, self.layout.keys))
        shapes = [(queries, self.heads), (keys, self.groups), (keys, self.groups)]
        q, k, v = (noise(self.batch, n, heads, WIDTH, seed=i) for i, (n, heads) in enumerate(shapes))
        return tuple(x.transpose(1, 2) if self.form is TORCH else x for x in (q, k, v))  # type: ignore[return-value]

    def call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """One rank's attention, in f64."""
        q, k, v = (x.double() if self.form is TORCH else x.double().transpose(1, 2) for x in (q, k, v))
        if mask is not None and mask.ndim == 2 and self.form is DISPATCH:
            mask = mask[:, None, None]
        mask = mask if mask is None or mask.dtype is torch.bool else mask.double()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.groups != self.heads).float()
        return out if self.form is TORCH else out.transpose(1, 2)

    def rows(self, x: Tensor, rank: int, division: Division, *, keys: bool, dim: int | None = None) -> Tensor:
        parts = self.layout.keys if keys else self.layout.queries
        pieces = [
            stretch(division, p.name, rank) if p.sharded else Stretch(self.lengths[p.name], 0, self.lengths[p.name])
            for p in parts
        ]
        return take(x, (2 if self.form.heads_first else 1) if dim is None else dim, pieces)

    def check(
        self, mask: Tensor | None = None, cut_mask: Callable[[Tensor, int, Division], Tensor] = lambda mask, *_: mask
    ) -> None:
        q, k, v = self.tensors()
        one = self.call(q, k, v, mask)

        def rank_of(comm: Communicator) -> bool:
            division, rank = divided(comm.ranks, text=self.lengths["text"], image=self.lengths["image"]), comm.rank
            local = [self.rows(x, rank, division, keys=keys) for x, keys in ((q, False), (k, True), (v, True))]
            mine = None if mask is None else cut_mask(mask, rank, division)
            sharding = Sharding(self.carrier(comm), division, self.mode)
            out = sharded_attention(*local, mine, self.layout, self.call, sharding=sharding, form=self.form)
            return torch.equal(out, self.rows(one, rank, division, keys=False))

        assert all(self.world.run(rank_of))


@pytest.mark.parametrize("form", [DISPATCH, TORCH], ids=["dispatch", "torch"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize(
    ("layout", "rest"),
    [
        ("text@ image@", 0),
        ("image@", 0),
        ("image@ -> image@ *", 6),
        ("image@ -> *", 6),
        ("image@ *", 3),
        ("text image@", 0),
    ],
)
def test_every_layout_is_bitwise(
    worlds: dict[int, LocalWorld], layout: str, rest: int, ranks: int, mode: str, form: Form
) -> None:
    Case(worlds[ranks], mode, layout=layout, form=form, rest=rest).check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", ["1 1 1 k", "b 1 1 k", "b 1 q k", "b h q k", "1 h 1 k", "h q k", "q k"])
def test_whole_masks_are_bitwise(
    worlds: dict[int, LocalWorld], shape: str, kind: torch.dtype, ranks: int, mode: str
) -> None:
    case = Case(worlds[ranks], mode, form=TORCH)
    mask = noise(*[{"b": 2, "h": 5, "q": 25, "k": 25, "1": 1}[dim] for dim in shape.split()], seed=7)
    case.check((mask > -1) if kind is torch.bool else mask)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("shape", "keys"), [((2, 1, 1, 25), True), ((2, 5, 1, 25), True), ((2, 1, 25, 25), False), ((2, 5, 25, 25), False)]
)
def test_a_mask_travels_with_its_tokens(
    worlds: dict[int, LocalWorld], shape: tuple[int, ...], keys: bool, ranks: int, mode: str
) -> None:
    case = Case(worlds[ranks], mode)
    case.check(
        noise(*shape, seed=7),
        lambda mask, rank, division: case.rows(mask, rank, division, keys=keys, dim=-1 if keys else -2),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("local", [False, True])
def test_a_key_mask_of_diffusers_is_one_of_batch_and_keys(
    worlds: dict[int, LocalWorld], local: bool, mode: str
) -> None:
    case = Case(worlds[3], mode)
    mask = noise(2, 25, seed=7) > -1
    case.check(mask, lambda mask, rank, division: case.rows(mask, rank, division, keys=True, dim=-1) if local else mask)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_grouped_keys_stay_with_their_queries(worlds: dict[int, LocalWorld], ranks: int, mode: str) -> None:
    case = Case(worlds[ranks], mode, heads=6)
    case.groups = 3
    case.check()


@pytest.mark.parametrize("ranks", [2, 3])
def test_torch_attention_is_bitwise_on_the_same_rows_or_heads(worlds: dict[int, LocalWorld], ranks: int) -> None:
    q, k, v = (noise(2, 5, 25, WIDTH, seed=i) for i in range(3))
    layout, sdpa = parse_layout("image@"), lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def rank_of(comm: Communicator) -> tuple[bool, bool]:
        division = divided(ranks, image=25)
        first = division.first("image", comm.rank)
        rows = slice(first, first + division.local("image", comm.rank))
        mine = [x[:, :, rows] for x in (q, k, v)]
        gathered, by_heads = (
            sharded_attention(*mine, None, layout, sdpa, sharding=Sharding(comm, division, mode), form=TORCH)
            for mode in MODES
        )
        heads = [sdpa(*(x[:, part] for x in (q, k, v)), None) for part in torch.arange(5).tensor_split(ranks)]
        return torch.equal(gathered, sdpa(q[:, :, rows], k, v, None)), torch.equal(
            by_heads, torch.cat(heads, 1)[:, :, rows]
        )

    assert worlds[ranks].run(rank_of) == [(True, True)] * ranks


@pytest.mark.parametrize("mode", MODES)
def test_few_tokens_leave_ranks_empty(worlds: dict[int, LocalWorld], mode: str) -> None:
    case = Case(worlds[7], mode)
    case.lengths = {"text": 0, "image": 3}
    case.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 1, 1, 24), (2, 1, 24, 25)])
def test_a_mask_of_another_length_is_named(worlds: dict[int, LocalWorld], shape: tuple[int, ...], mode: str) -> None:
    q, k, v = Case(worlds[2], mode).tensors()
    division = divided(2, text=9, image=16)
    sharding = Sharding(worlds[2].communicators[0], division, mode)
    rows = [x[:, : division.local("text", 0) + division.local("image", 0)] for x in (q, k, v)]
    with pytest.raises(ShapeError, match="`mask` needs 25"):
        sharded_attention(*rows, torch.zeros(shape), parse_layout("text@ image@"), lambda *_: q, sharding=sharding)


def test_a_layout_that_does_not_fit_its_call_is_named(worlds: dict[int, LocalWorld]) -> None:
    division = divided(2, text=9, image=16)
    sharding = Sharding(worlds[2].communicators[0], division, "gather_kv")
    x = torch.zeros(2, 13, 5, WIDTH)
    with pytest.raises(ShapeError, match="`q` needs 8 tokens on rank 0 for the layout 'image@'; got 13"):
        sharded_attention(x, x, x, None, parse_layout("image@"), lambda *_: x, sharding=sharding)


@pytest.mark.parametrize("wrong", ["", "a -> b -> c", "a@ a", "*@", "a@~1", "a -> "])
def test_layouts_that_cannot_be_read(wrong: str) -> None:
    with pytest.raises(PlanError, match="attention layout"):
        parse_layout(wrong)


def test_a_call_that_the_plan_does_not_know_is_named() -> None:
    calls = parse_calls(("text@ image@", "image@ -> *"))
    assert str(calls[1]) == "image@ -> *"
    with pytest.raises(PlanError, match="attention call 3 of a module that makes 2"):
        calls[2]
    assert parse_calls(("text@ image@", "image@ -> *", "..."))[9] == parse_layout("image@ -> *")
