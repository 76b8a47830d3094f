"""What ranks have done, as a handle tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from purlin_diffusion.graph.counts import GraphCounts


@dataclass(frozen=True)
class Counters:
    """What one rank has done: root calls, and the tokens of each segment it computed.

    Over all ranks the tokens of a segment sum to its lengths in all calls, and to `ranks` times those lengths in calls where it stayed whole on every
    rank; `kept` counts the tokens of such calls alone. In calls of which guidance halved the batch each rank computed all tokens, of its half of the
    rows: `halved` counts those calls. `graphs`: how much of it was done by CUDA graphs.
    """

    rank: int
    calls: int
    tokens: Mapping[str, int]
    kept: Mapping[str, int]
    graphs: GraphCounts = field(default_factory=GraphCounts)
    halved: int = 0
