"""One attention call as a mode sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from purlin_diffusion.attention.tokens import Tokens
from purlin_diffusion.carrier import Carrier

# What computes attention on this rank: queries, keys, values, mask -> output.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Form:
    """How a door passes tensors. Modes see [batch, tokens, heads, width] always: ranks make the same exchange, whatever door each came by.

    heads_first: as [batch, heads, tokens, width]. key_masks: a mask [batch, keys] masks keys; else it is [queries, keys], as torch takes it.
    """

    heads_first: bool
    key_masks: bool

    def tokens_first(self, x: Tensor) -> Tensor:
        """A tensor of this form as modes see it, or back: its own inverse."""
        return x.transpose(1, 2) if self.heads_first else x


DISPATCH = Form(heads_first=False, key_masks=True)  # diffusers' dispatch_attention_fn
TORCH = Form(heads_first=True, key_masks=False)  # torch's scaled_dot_product_attention


@dataclass(frozen=True)
class Task:
    """What a mode needs beside q, k, v and the mask. `attend` takes and returns [batch, tokens, heads, width], empty ones too."""

    carrier: Carrier
    form: Form
    queries: Tokens
    keys: Tokens
    attend: Attend
