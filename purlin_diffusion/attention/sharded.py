"""The one function behind every door: attention over tokens that are sharded over ranks.

Laws: every rank sees keys in the order one GPU has; a mask travels with its tokens; what is not sharded moves nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from purlin_core.errors import ShapeError
from purlin_diffusion.attention.gather_kv import gather_kv
from purlin_diffusion.attention.layout import AttentionLayout
from purlin_diffusion.attention.mask import mask_shape, my_rows
from purlin_diffusion.attention.task import DISPATCH, Attend, Form, Task
from purlin_diffusion.attention.tokens import tokens_of
from purlin_diffusion.attention.ulysses import ulysses
from purlin_diffusion.compiled import Sharding, current

MODES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, Task], Tensor]] = {
    "gather_kv": gather_kv,
    "ulysses": ulysses,
}


def sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    layout: AttentionLayout,
    call: Attend,
    *,
    sharding: Sharding,
    form: Form = DISPATCH,
) -> Tensor:
    """Attention of this rank's queries `q` over the keys and values of all ranks.

    q, k, v: this rank's tokens, in the dims of `form`, any strides, any batch; k and v may have fewer heads (a divisor of q's).
    mask: bool or additive, broadcast as torch does, for all tokens or for this rank's along either dim; None for none.
    layout: which segments lie along the tokens of q, and of k and v. call: computes attention on one rank.
    Returns what `call` returns for this rank's rows, bit for bit where `call` computes rows alone. Raises ShapeError.
    """
    sharding = current(sharding)
    division, rank = sharding.division, sharding.carrier.rank
    q, k, v = form.tokens_first(q), form.tokens_first(k), form.tokens_first(v)
    if v.shape[1] != k.shape[1] or q.shape[2] % k.shape[2]:
        raise ShapeError(
            "sharded_attention: `v` needs k's tokens and `q` a multiple of k's heads; got, as batch, tokens, heads, width,"
            f" q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    queries = tokens_of(layout.queries, q.shape[1], division=division, rank=rank, rest="qrest", what="q")
    keys = tokens_of(layout.keys, k.shape[1], division=division, rank=rank, rest="krest", what="k")

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.numel() == 0:  # no queries or no heads on this rank, which not every backend takes
            return q.new_empty((*q.shape[:-1], v.shape[-1]))
        return form.tokens_first(call(form.tokens_first(q), form.tokens_first(k), form.tokens_first(v), mask))

    task = Task(sharding.carrier, form, queries, keys, attend)
    if keys.sharded and division.ranks > 1:
        return form.tokens_first(MODES[sharding.mode](q, k, v, mask, task))
    if mask is not None:
        shape = mask_shape(mask, form=form, batch=q.shape[0], queries=queries, keys=keys)
        mask = my_rows(mask, shape, queries)
    return form.tokens_first(attend(q, k, v, mask))
