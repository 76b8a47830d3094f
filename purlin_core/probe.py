"""One real exchange through a fresh communicator on GPUs: what set-up cannot see (a switch that drops stores, a wrong mapping) shows here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from purlin_core import _cpu
from purlin_core.lane import Lane
from purlin_core.prepare import Asked, Site, prepare

BYTES = 48  # of each rank


def probe(site: Site, end: _cpu.Endpoint, lane: Lane, *, ready: Callable[[], object], timeout: float) -> str:
    """What is wrong with the bytes that came within `timeout` seconds; empty when nothing is. All ranks call it together.

    `ready` waits for all ranks: what torch does for the first time cannot be done behind a kernel that waits for a peer.
    """
    device = site.atom.device
    asked = Asked("set-up", "n@ -> n", (), "sum", "", device, granted=False)
    wanted = torch.cat([_bytes_of(rank) for rank in range(site.ranks)])
    with site.atom.current():
        x, out = _bytes_of(site.rank).to(device), torch.zeros(len(wanted), dtype=torch.uint8, device=device)
        native = prepare(site, asked, [x], [out]).native
        ready()
        code = end.run(native, [x.data_ptr()], [out.data_ptr()], lane.enter())
        if code != 0:
            return f"its first call failed with code {code}"
        if not lane.settled(timeout):
            return f"its first call did not end within {timeout:g} s"
        wrong = (out.cpu() != wanted).view(site.ranks, BYTES).any(1).nonzero().flatten().tolist()
    return f"bytes from rank {', '.join(map(str, wrong))} did not come, or came wrong" if wrong else ""


def _bytes_of(rank: int) -> torch.Tensor:
    return (torch.arange(BYTES) * 5 + 17 * rank + 1).to(torch.uint8)
