"""How one tensor or argument enters or leaves the sharded part of a model, as a plan writes it.

"b image@ c"                  cut along dim 1; a tensor of another rank than the spec's is refused
("image@ c", "b image@ c")    either, by the tensor's rank
"b (image@ *) c"              the image tokens are cut, what follows them is the same on every rank
"b c h w"                     a root argument of which nothing is cut but rows of the batch, `b`, where guidance is halved
"whole"                       as it is on every rank
{"scale": "whole", ...}       a dict, key by key; other keys are refused
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from purlin_core.errors import SpecError
from purlin_core.spec import Layout, Spec
from purlin_diffusion.errors import PlanError

WHOLE = "whole"
REST = "rest"  # what `*` is called inside a spec
BATCH = "b"  # what a dim of the batch is called

Written: TypeAlias = "str | tuple[str, ...] | Mapping[str, Written]"
Entry: TypeAlias = "Cut | Keys"


@dataclass(frozen=True)
class Cut:
    """A tensor (or a list, tuple or dict of them) that has one of these layouts; `whole` lets every other through as it is."""

    forms: tuple[Layout, ...] = ()
    whole: bool = False

    @property
    def segments(self) -> frozenset[str]:
        return frozenset(name for form in self.forms for name in form.segments) & self._sharded

    @property
    def _sharded(self) -> frozenset[str]:
        return frozenset(name for form in self.forms for name, segment in form.segments.items() if segment.sharded)

    def form(self, ndim: int) -> Layout | None:
        """The layout of a tensor of `ndim` dims, None where there is none."""
        return next((form for form in self.forms if len(form.dims) == ndim), None)

    def __str__(self) -> str:
        return " | ".join([str(form).replace(REST, "*") for form in self.forms] + [WHOLE] * self.whole)


@dataclass(frozen=True)
class Keys:
    """A dict argument: what each key holds."""

    entries: Mapping[str, Entry]

    @property
    def segments(self) -> frozenset[str]:
        return frozenset(name for entry in self.entries.values() for name in entry.segments)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in self.entries.items()) + "}"


def parse_entry(written: Written, where: str, *, batch: bool = False) -> Entry:
    """Read one entry of a plan; `where` names it in errors. `batch`: a layout of which only the batch may be cut is one too. Raises PlanError."""
    if isinstance(written, Mapping):
        return Keys({key: parse_entry(value, f"{where}[{key!r}]", batch=batch) for key, value in written.items()})
    texts = (written,) if isinstance(written, str) else tuple(written)
    forms = tuple(layout_of(text, where, batch=batch) for text in texts if text != WHOLE)
    if len({len(form.dims) for form in forms}) < len(forms):
        raise PlanError(
            f"plan: {where} needs forms with different numbers of dims; got {texts}. A tensor's rank chooses among them."
        )
    return Cut(forms, whole=WHOLE in texts)


def batch_dim(form: Layout) -> int | None:
    """The dim of `form` that is the batch's alone."""
    return next((i for i, dim in enumerate(form.dims) if dim.names == (BATCH,)), None)


def layout_of(text: str, where: str, *, batch: bool = False) -> Layout:
    """One layout of a plan, see parse_entry()."""
    if any(mark in text for mark in ("->", "+", "~")):
        raise PlanError(
            f"plan: {where} needs one side of a spec, as `b image@ c`; got {text!r}. Write the sharded side alone."
        )
    side = text.replace("*", REST)
    try:
        layout = Spec.parse(f"{side} -> {side.replace('@', '')}").left
    except SpecError as error:
        raise PlanError(f"plan: {where} cannot be read: {error}") from error
    if layout.sharded_dim is None and not (batch and batch_dim(layout) is not None):
        raise PlanError(
            f"plan: {where} needs a sharded segment, as `b image@ c`{', or the batch, as `b c h w`' * batch}; got {text!r}."
            " Write 'whole' for what is not cut."
        )
    return layout
