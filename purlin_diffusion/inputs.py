"""The denoiser's inputs come from the root at every call, so that seeds, schedulers and callbacks cannot make ranks drift.

Their structure (containers, shapes, dtypes, numbers, texts) must be alike on all ranks; it is compared first, by a digest, and a difference is named
on all of them. Then the root's tensors take the place of every rank's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from purlin_core.prepare import MAX_TENSORS
from purlin_diffusion.carrier import Carrier
from purlin_diffusion.errors import InputsDifferError
from purlin_diffusion.tree import leaves, map_tensors

DIGEST_BYTES = 16
HOOKS, FAILED = "hooks of diffusers: ", "an error: "  # so begin lines that say more than what the inputs are
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


@dataclass(frozen=True)
class Carriers:
    """`device` moves tensors; `host` moves what Python has to read, and is a CPU one."""

    device: Carrier
    host: Carrier


def from_root(
    arguments: Mapping[str, Any], carriers: Carriers, word: int = 0, where: str = "", hooks: str = "", picture: int = 0
) -> tuple[dict[str, Any], list[int]]:
    """`arguments` with every tensor the root's, and the `word` (0 to 255) of every rank. Collective.

    Raises InputsDifferError, on every rank, when their structures differ, or `where`: what this rank does; or `hooks`: those on its model. `picture`:
    as agree() has it.
    """
    if carriers.device.ranks == 1:
        return dict(arguments), [word]
    words = agree([where, *filter(None, [hooks]), *describe(arguments)], carriers.host, word, picture)
    mine = [value for _, value in leaves(arguments) if isinstance(value, Tensor)]
    theirs = iter(_broadcast([x for x in mine if x.device.type != "cpu"], carriers.device))
    theirs_host = iter(_broadcast([x for x in mine if x.device.type == "cpu"], carriers.host))
    got = map_tensors(dict(arguments), lambda x: next(theirs_host if x.device.type == "cpu" else theirs))
    return dict(got), words


def describe(arguments: Mapping[str, Any]) -> list[str]:
    """One line a leaf: all that must be alike on every rank."""
    return [f"{path}: {_describe(value)}" for path, value in leaves(arguments)]


def agree(lines: list[str], host: Carrier, word: int = 0, picture: int = 0) -> list[int]:
    """The `word` (0 to 255) of every rank. Raises InputsDifferError on every rank unless `lines` are alike on all. Collective.

    `picture`: the number of the picture that this rank draws. Ranks at an earlier one hear, by InputsDifferError, that others have left it before its
    steps began; those wait here until all have come.
    """
    text = "\n".join(lines).encode(errors="backslashreplace")
    said = hashlib.blake2b(text + b"%d" % picture, digest_size=DIGEST_BYTES).digest() + bytes([word])
    packet = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    while True:
        packets = host.exchange([packet], ["n@ -> n"])[0].view(host.ranks, len(said))
        digests, words = packets[:, :DIGEST_BYTES], packets[:, DIGEST_BYTES]
        if bool((digests == digests[0]).all()):
            return [int(each) for each in words]
        texts = _gather_texts(text, host)
        pictures = host.exchange([torch.tensor([picture])], ["n@ -> n"])[0].tolist()
        latest = max(pictures)
        if picture < latest:
            raise InputsDifferError(_left(picture, [rank for rank, at in enumerate(pictures) if at == latest]))
        if min(pictures) == latest:
            other = next(rank for rank in range(1, host.ranks) if texts[rank] != texts[0])
            raise InputsDifferError(_difference(texts[0].split("\n"), texts[other].split("\n"), other))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor {tuple(value.shape)} on {value.device.type}"
    if isinstance(value, _PLAIN) or (isinstance(value, (list, tuple, Mapping)) and not value):
        return repr(value)
    return type(value).__name__


def tell(text: str, host: Carrier) -> list[str]:
    """The text of every rank. Collective."""
    return _gather_texts(text.encode(errors="backslashreplace"), host)


def _gather_texts(text: bytes, host: Carrier) -> list[str]:
    lengths = host.exchange([torch.tensor([len(text)])], ["n@ -> n"])[0].tolist()
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    joined = host.exchange([mine], ["n@ -> n"], sizes={"n": lengths})[0]
    return [bytes(part.tolist()).decode() for part in torch.split(joined, lengths)]


def _left(picture: int, ahead: list[int]) -> str:
    who = f"rank{'s' * (len(ahead) > 1)} {', '.join(map(str, ahead))}"
    return (
        f"parallelize: {who} left picture {picture} before its steps began, and went on to another: what was met there stands in the output of {who}."
        " The next picture begins alike."
    )


def _difference(root: list[str], other: list[str], rank: int) -> str:
    if root[0] != other[0]:  # they are not at the same call: what it is called with says nothing
        root, other = root[:1], other[:1]
    said = [line for line in root if line not in other]
    heard = [line for line in other if line not in root]
    hooked = any(line.startswith(HOOKS) for line in (*said, *heard))
    cure = "Call the pipeline with the same prompt, size, steps and options on every rank"
    if any(line.startswith(FAILED) for line in (*said, *heard)):
        cure = "The next picture begins alike"
    return (
        f"parallelize: the denoiser's inputs differ between ranks. Rank 0 has {'; '.join(said) or 'nothing more'};"
        f" rank {rank} has {'; '.join(heard) or 'nothing more'}. {cure}{', and put hooks (a cache, a casting) on the models of all' * hooked}."
    )


def _broadcast(tensors: list[Tensor], carrier: Carrier) -> list[Tensor]:
    """Every rank's copy of the root's `tensors`, as many a call as one may have."""
    calls = [tensors[at : at + MAX_TENSORS] for at in range(0, len(tensors), MAX_TENSORS)]
    return [theirs for each in calls for theirs in _broadcast_some(each, carrier)]


def _broadcast_some(tensors: list[Tensor], carrier: Carrier) -> list[Tensor]:
    """An all-gather in which all shards but the root's are empty."""
    flat = [x.reshape(-1) if carrier.rank == 0 else x.new_empty(0) for x in tensors]
    specs = [f"n{i}@ -> n{i}" for i in range(len(tensors))]
    sizes = {f"n{i}": (x.numel(),) + (0,) * (carrier.ranks - 1) for i, x in enumerate(tensors)}
    return [y.view(x.shape) for x, y in zip(tensors, carrier.exchange(flat, specs, sizes=sizes), strict=True)]
