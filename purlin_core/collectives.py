"""The collectives under torch's names, and halo(), as specs. What a call hands over are views, at the same addresses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from purlin_core.arguments import check_halo
from purlin_core.errors import ShapeError
from purlin_core.spec import Sizes


def as_spec(call: str, x: Tensor, out: Tensor, ranks: int) -> tuple[str, Tensor, Tensor]:
    """A collective of torch's names as spec, input and output."""
    if call == "all_to_all_single":
        return _all_to_all(x, out, ranks)
    if call == "all_gather_into_tensor" and out.ndim == x.ndim + 1:
        x = x.unsqueeze(0)
    if call == "all_reduce" and x.ndim == 0:
        x, out = x.view(1), out.view(1)
    if x.ndim == 0:
        raise ShapeError(f"{call}: `x` needs at least one dim; got a scalar. Pass x.view(1).")
    rest = "".join(f" d{i}" for i in range(1, x.ndim))
    specs = {
        "all_gather_into_tensor": f"d0@{rest} -> d0{rest}",
        "reduce_scatter_tensor": f"+d0{rest} -> d0@{rest}",
        "all_reduce": f"+d0{rest} -> d0{rest}",
        "barrier": "d0@ -> d0",
    }
    return specs[call], x, out


def halo_spec(x: Tensor, dim: int, rows: int | tuple[int, int]) -> tuple[str, str]:
    """The spec of halo(), and the name in it of the dim that is sharded."""
    check_halo(dim, rows)
    before, after = (rows, rows) if isinstance(rows, int) else rows
    if not -x.ndim <= dim < x.ndim or min(before, after) < 0:
        raise ShapeError(f"halo: needs `dim` among {x.ndim} dims and `rows` >= 0; got dim={dim}, rows={rows}.")
    names = [f"d{i}" for i in range(x.ndim)]
    left, right, name = list(names), list(names), names[dim]
    left[dim], right[dim] = f"{name}@", f"{name}@~{before}:{after}"
    return f"{' '.join(left)} -> {' '.join(right)}", name


def rows_of(name: str, sizes: Sequence[int] | None) -> Sizes | None:
    """`sizes` of one name, as specs take them."""
    return None if sizes is None else {name: sizes}


def _all_to_all(x: Tensor, out: Tensor, ranks: int) -> tuple[str, Tensor, Tensor]:
    """With equal shares: dim 0 is two, the source and its rows on the left, the reader and its rows on the right."""
    if x.ndim == 0 or out.shape != x.shape or x.shape[0] % ranks:
        needed = f"`x` and `out` of one shape, dim 0 divisible by {ranks} ranks"
        came = f"{_in_words(x)} and {_in_words(out)}"
        raise ShapeError(
            f"all_to_all_single: needs {needed}; got {came}. Pass in_sizes and out_sizes for uneven shares."
        )
    rest = "".join(f" d{i}" for i in range(2, x.ndim + 2))
    rows = (ranks, x.shape[0] // ranks)
    return f"d0@ d1{rest} -> d0 d1@{rest}", _split(x, rows).unsqueeze(0), _split(out, rows).unsqueeze(1)


def _in_words(x: Tensor) -> str:
    return f"{x.shape[0]} rows of {tuple(x.shape[1:])}" if x.ndim else "a scalar"


def _split(x: Tensor, rows: tuple[int, int]) -> Tensor:
    """Dim 0 as two dims; a view whatever the strides."""
    return x.as_strided((*rows, *x.shape[1:]), (x.stride(0) * rows[1], *x.stride()))
