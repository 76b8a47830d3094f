"""What is exchanged, and what must come of it. A case is one or two specs over tensors of one dtype; sizes are those of the whole message.

As in nccl-tests, the bytes of a case are those of an all-gather's output and of the others' input, on one rank; its bus bandwidth is
bytes / time x (ranks - 1) / ranks, twice that for an all-reduce: what each rank's link carries in each direction.

A case of uneven shares has the bytes of the even one of its largest share: the largest message of one rank to another is the same in both, and so
is what the busiest link carries in its busier direction, the bus bandwidth of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from purlin_core.spec import Sizes, Spec

Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
Parts: TypeAlias = list[tuple[list[Tensor], list[Tensor]]]  # of one rank, a step: inputs and outputs

# Sums that are fed their own results grow by the rank count a call, and begin here so that they stay finite.
FAINT = 2.0**-100


@dataclass(frozen=True)
class Step:
    """One exchange of `count` tensors by one spec; `shape` is that of one rank's input where shares are equal.

    `strided`: they are slices of one tensor, as a fused projection makes them. `shares`: rows a rank where they differ, of the dim that the right
    shards, or else of the one that the left does.
    """

    spec: str
    shape: tuple[int, ...]
    count: int = 1
    strided: bool = False
    shares: tuple[int, ...] = ()

    @property
    def right_dim(self) -> int | None:
        """The dim that the right shards, as it is numbered on the left."""
        spec = Spec.parse(self.spec)
        return None if spec.right.sharded_dim is None else spec.order[spec.right.sharded_dim]

    @property
    def shared_dim(self) -> int:
        """The dim that `shares` are of, as it is numbered on the left."""
        dims = self.right_dim, Spec.parse(self.spec).left.sharded_dim
        return next(dim for dim in dims if dim is not None)

    @property
    def sizes(self) -> Sizes | None:
        """As a communicator takes them."""
        return {Spec.parse(self.spec).left.dims[self.shared_dim].names[0]: self.shares} if self.shares else None

    @property
    def numel(self) -> int:
        return self.count * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Case:
    collective: str
    ranks: int
    bytes: int  # of the whole message; of uneven shares, that of `even`
    dtype: torch.dtype
    steps: tuple[Step, ...]
    in_place: bool = False  # of a one-step case

    @property
    def uneven(self) -> bool:
        return any(step.shares for step in self.steps)

    @property
    def even(self) -> Case:
        """The same with equal shares, each as large as the largest."""
        steps = tuple(replace(step, shares=()) for step in self.steps)
        return replace(self, collective=self.collective.removesuffix(UNEVEN_SUFFIX), steps=steps)

    @property
    def reduces(self) -> bool:
        return any(Spec.parse(step.spec).partial for step in self.steps)

    @property
    def lends_inputs(self) -> bool:
        """Whether peers of a direct call read its inputs; of all others they write the outputs."""
        return self.reduces and self.collective != "all_reduce"

    @property
    def busbw_bytes(self) -> float:
        """Bytes that each rank's link must carry in each direction; of uneven shares, the busiest link in its busier one."""
        return self.bytes * (self.ranks - 1) / self.ranks * (2 if self.collective == "all_reduce" else 1)

    @property
    def touched_bytes(self) -> int:
        """Bytes of one rank's inputs and outputs; of uneven shares, those of `even`, so that buffers of both rotate alike."""
        given = sum(step.numel for step in self.steps)
        made = self.even._made(0)
        return (max(given, made) if self.in_place else given + made) * self.dtype.itemsize

    def copied_bytes(self, rank: int) -> int:
        """Bytes that a plain copy standing for this rank's part must move: those it must write, or of a sum those it must be sent."""
        made = self._made(rank)
        if self.reduces:
            return int(self.busbw_bytes * made / self.even._made(rank))
        own = made // self.ranks if self.in_place else 0
        return (made - own) * self.dtype.itemsize

    def _made(self, rank: int) -> int:
        """Elements of this rank's outputs."""
        return sum(step.count * torch.Size(out_shape(step, self.ranks, rank=rank)).numel() for step in self.steps)


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
UNEVEN_SUFFIX = "_v"  # as MPI names them
UNEVEN_PART = 8  # an eighth
UNEVEN = ("all_gather_v", "reduce_scatter_v", "all_to_all_v")
# FLUX.1 at 1024x1024: 4096 image and 512 text tokens, 24 heads of 128.
FLUX_TOKENS, FLUX_HEADS, FLUX_HEAD_DIM = 4096 + 512, 24, 128
SHAPES = ("flux1024_qkv_o", "flux1024_qkv_o_strided", "flux1024_kv", "flux1024_kv_strided")


def collective(name: str, ranks: int, size: int, dtype: torch.dtype, *, in_place: bool = False) -> Case:
    """One of COLLECTIVES or UNEVEN; `size` must be divisible by ranks x the dtype's bytes."""
    numel = size // dtype.itemsize
    share = numel // ranks
    steps = {
        "all_gather": Step("n@ -> n", (share,)),
        "reduce_scatter": Step("+n -> n@", (numel,)),
        "all_reduce": Step("+n -> n", (numel,)),
        "all_to_all": Step("s@ h -> s h@", (1, numel)),
    }
    step = steps[name.removesuffix(UNEVEN_SUFFIX)]
    if name in UNEVEN:
        step = replace(step, shares=shares_of(share, ranks))
    return Case(name, ranks, size, dtype, (step,), in_place)


def shares_of(largest: int, ranks: int) -> tuple[int, ...]:
    """`largest` and an eighth less by turns, so that the largest message of one rank to another is that of the even case of the same bytes."""
    return tuple(largest - largest // UNEVEN_PART * (rank % 2) for rank in range(ranks))


def shape(name: str, ranks: int) -> Case:
    """One of SHAPES, bf16: q, k and v from tokens to heads and the result back, or k and v gathered."""
    tokens, heads, strided = FLUX_TOKENS // ranks, FLUX_HEADS // ranks, name.endswith("strided")
    if not name.startswith("flux1024_qkv_o"):
        gather = Step("b s@ h d -> b s h d", (1, tokens, FLUX_HEADS, FLUX_HEAD_DIM), 2, strided)
        return Case(name, ranks, ranks * gather.numel * 2, torch.bfloat16, (gather,))
    to_heads = Step("b s@ h d -> b s h@ d", (1, tokens, FLUX_HEADS, FLUX_HEAD_DIM), 3, strided)
    back = Step("b s h@ d -> b s@ h d", (1, ranks * tokens, heads, FLUX_HEAD_DIM))
    return Case(name, ranks, (to_heads.numel + back.numel) * 2, torch.bfloat16, (to_heads, back))


def fits(name: str, ranks: int) -> bool:
    """Whether the shape splits evenly."""
    return FLUX_TOKENS % ranks == 0 and FLUX_HEADS % ranks == 0


def in_shape(step: Step, ranks: int, *, rank: int) -> tuple[int, ...]:
    return _shard(step, ranks, rank, Spec.parse(step.spec).left.sharded_dim)


def out_shape(step: Step, ranks: int, *, rank: int) -> tuple[int, ...]:
    shape = _shard(step, ranks, rank, step.right_dim)
    return tuple(shape[dim] for dim in Spec.parse(step.spec).order)


def _shard(step: Step, ranks: int, rank: int, dim: int | None) -> tuple[int, ...]:
    """This rank's part along `dim`, dims as on the left."""
    sizes = _whole(step, ranks)
    if dim is not None:
        sizes[dim] = step.shares[rank] if step.shares and dim == step.shared_dim else sizes[dim] // ranks
    return tuple(sizes)


def _whole(step: Step, ranks: int) -> list[int]:
    sizes, dim = list(step.shape), Spec.parse(step.spec).left.sharded_dim
    if dim is not None:
        sizes[dim] *= ranks
    if step.shares:
        sizes[step.shared_dim] = sum(step.shares)
    return sizes


# ---- tensors ---------------------------------------------------------------------------------------------------------


def make(case: Case, rank: int, inputs: Allocate, outputs: Allocate) -> Parts:
    """Tensors of one rank, not filled."""
    if case.in_place:
        return [_in_place(case, rank, inputs, outputs)]
    parts = []
    for step in case.steps:
        if step.strided:
            fused = inputs((*step.shape[:2], step.count, *step.shape[2:]), case.dtype)
            given = list(fused.unbind(2))
        else:
            given = [inputs(in_shape(step, case.ranks, rank=rank), case.dtype) for _ in range(step.count)]
        parts.append((given, [outputs(out_shape(step, case.ranks, rank=rank), case.dtype) for _ in range(step.count)]))
    return parts


def _in_place(case: Case, rank: int, inputs: Allocate, outputs: Allocate) -> tuple[list[Tensor], list[Tensor]]:
    """All-gather from its own shard of the output, reduce-scatter into its own shard of the input, all-reduce onto itself."""
    (step,) = case.steps
    if case.collective == "all_gather":
        out = outputs(out_shape(step, case.ranks, rank=rank), case.dtype)
        return [out.chunk(case.ranks)[rank]], [out]
    if case.collective not in ("reduce_scatter", "all_reduce"):
        raise ValueError(f"{case.collective} has no form in place")
    if case.collective == "all_reduce":
        x = outputs(step.shape, case.dtype)
        return [x], [x]
    x = inputs(step.shape, case.dtype)
    return [x], [x.chunk(case.ranks)[rank]]


def fill(case: Case, parts: Parts, rank: int, turn: int) -> None:
    """Outputs full of NaN, then inputs of their own for every rank and turn."""
    for index, (_, outs) in enumerate(parts):
        for out in outs:
            out.fill_(float("nan"))
        for x, values in zip(
            parts[index][0], values_of(case, index, rank, turn, parts[index][0][0].device), strict=True
        ):
            x.copy_(values)


def dim_down(case: Case, parts: Parts, rank: int) -> None:
    """Inputs of a sum in place that can be fed its own results for a while."""
    for x in (x for given, _ in parts for x in given):
        x.copy_(values_of(case, 0, rank, 0, x.device)[0] * FAINT)


def values_of(case: Case, index: int, rank: int, turn: int, device: torch.device) -> list[Tensor]:
    """What rank `rank` passes to step `index`; any rank can tell."""
    step = case.steps[index]
    generator = torch.Generator(device).manual_seed(1 + rank + 64 * (index + 4 * turn))
    shape = in_shape(step, case.ranks, rank=rank)
    return [torch.randn(shape, generator=generator, device=device, dtype=case.dtype) for _ in range(step.count)]


def wrong(case: Case, parts: Parts, rank: int, turn: int) -> str:
    """What is wrong with the outputs of fill()'s inputs; empty when nothing is. Copies must be equal, sums within their rounding."""
    for index, (step, (_, outs)) in enumerate(zip(case.steps, parts, strict=True)):
        everyone = [values_of(case, index, peer, turn, outs[0].device) for peer in range(case.ranks)]
        for number, out in enumerate(outs):
            wanted = expected(step, [theirs[number] for theirs in everyone], rank)
            if Spec.parse(step.spec).partial:
                error = (out.double() - wanted.double()).norm() / wanted.double().norm()
                bad = not error.item() <= case.ranks * torch.finfo(case.dtype).eps
            else:
                bad = not torch.equal(out, wanted)
            if bad:
                return f"rank {rank}, call {turn}, step {index}, tensor {number}"
    return ""


def expected(step: Step, inputs: Sequence[Tensor], rank: int) -> Tensor:
    """Spec.reference is the meaning of all specs, and a test compares the two."""
    spec = Spec.parse(step.spec)
    if spec.partial:
        total = inputs[0].float()
        for x in inputs[1:]:
            total = total + x.float()
        whole = total.to(inputs[0].dtype)
    else:
        whole = torch.cat(list(inputs), spec.left.sharded_dim or 0)
    whole = whole.permute(spec.order)
    dim = spec.right.sharded_dim
    if dim is None:
        return whole
    rows = step.shares or (whole.shape[dim] // len(inputs),) * len(inputs)
    return whole.narrow(dim, sum(rows[:rank]), rows[rank])
