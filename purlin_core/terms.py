"""What ranks tell each other of themselves at set-up, and what must fit before they share memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from purlin_core.arguments import check_heap_bytes
from purlin_core.atom import Atom
from purlin_core.cuda_memory import no_access
from purlin_core.errors import INPUT_ERRORS, SetupError
from purlin_core.settings import VERSION, Settings
from purlin_core.tune import Scratch, Tuning


def check_arguments(timeout: Any, setup_timeout: Any, heap_bytes: Any, teams: Any, scratch: Any, tuning: Any) -> None:
    """Raise SetupError for the first argument of a Communicator that cannot be."""
    if not (_is_time(timeout) and _is_time(setup_timeout)):
        came = f"timeout={timeout!r}, setup_timeout={setup_timeout!r}"
        raise SetupError(f"Communicator: needs positive timeouts in seconds; got {came}.")
    try:
        check_heap_bytes("Communicator", heap_bytes)
    except INPUT_ERRORS as error:
        raise SetupError(str(error)) from None
    for name, value, wanted in (("teams", teams, int), ("scratch", scratch, Scratch), ("tuning", tuning, Tuning)):
        if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise SetupError(
                f"Communicator: `{name}` needs to be of type {wanted.__name__}, or None; got {value!r:.80}."
            )


def _is_time(timeout: object) -> bool:
    return isinstance(timeout, int | float) and 0 < timeout < float("inf")


def terms_of(
    atom: Atom, ranks: int, scratch: Scratch, tuning: Tuning, settings: Settings, heap_bytes: int
) -> dict[str, Any]:
    """What must be the same on all ranks."""
    return {
        "protocol": VERSION,
        "ranks": ranks,
        "device type": atom.device.type,
        "tuning": tuning.hash,
        "heap_bytes": heap_bytes,
        **asdict(scratch),
        **asdict(settings),
    }


def card_of(atom: Atom, terms: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank says of itself; JSON."""
    return {
        "machine": platform.node(),
        "pid": os.getpid(),
        "device": str(atom.device),
        "identity": atom.identity,
        "terms": terms,
    }


def check_cards(cards: Sequence[Mapping[str, Any]], atom: Atom, *, local: bool) -> None:
    """Raise SetupError, the same on every rank, when the ranks that told these cannot form a communicator."""
    check_terms([card["terms"] for card in cards])
    for card in cards:
        if card["machine"] != platform.node():
            raise SetupError(
                f"Communicator: all ranks need to be on one machine; this is {platform.node()!r}, a peer is on {card['machine']!r}. "
                "Use torch.distributed for the axis between machines."
            )
    if not local and atom.device.type == "cuda":
        _check_processes(cards)
        _check_access(cards, atom)


def check_terms(terms: Sequence[Mapping[str, Any]]) -> None:
    """Raise SetupError, the same on every rank, when ranks bring other terms than rank 0."""
    for rank, theirs in enumerate(terms):
        for name, value in terms[0].items():
            if theirs.get(name) != value:
                raise SetupError(
                    f"Communicator: ranks need the same `{name}`; rank 0 has {value!r}, rank {rank} has {theirs.get(name)!r}."
                )


def _check_processes(cards: Sequence[Mapping[str, Any]]) -> None:
    """A process and a GPU a rank: kernels of two processes on one GPU take turns, and would wait for each other for ever."""
    cure = "Make them threads of one process: LocalWorld(ranks, device=...)."
    for rank, card in enumerate(cards):
        for other, there in enumerate(cards[:rank]):
            if card["identity"] == there["identity"]:
                raise SetupError(
                    f"Communicator: ranks {other} and {rank} are both on GPU {card['identity']} ({card['device']}). {cure}"
                )
            if card["pid"] == there["pid"]:
                raise SetupError(
                    f"Communicator: ranks {other} and {rank} on '{card['device']}' are of one process. {cure}"
                )


def _check_access(cards: Sequence[Mapping[str, Any]], atom: Atom) -> None:
    """Where a peer's GPU is visible here, this one must reach it; where it is not, the first exchange will tell."""
    own = atom.device.index
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for card in cards:
        peer = seen.get(card["identity"], own)
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            raise no_access(own, peer)
