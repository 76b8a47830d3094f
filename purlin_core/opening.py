"""What a communicator is made with, checked once: each connection that it has, one after another, is made with the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from purlin_core.atom import Atom, atom_of
from purlin_core.connection import Connection
from purlin_core.errors import SetupError
from purlin_core.rendezvous import LocalRendezvous, Rendezvous, meeting_of
from purlin_core.settings import Settings
from purlin_core.terms import check_arguments
from purlin_core.tune import Scratch, Tuning, most_teams

MAX_RANKS = 16


@dataclass(frozen=True)
class Opening:
    meeting: Rendezvous
    atom: Atom
    scratch: Scratch
    tuning: Tuning
    settings: Settings
    blocks: int  # of a GPU that one call may take
    timeout: float
    setup_timeout: float

    @staticmethod
    def of(
        group: Any,
        device: torch.device | str,
        *,
        rank: int | None,
        ranks: int | None,
        timeout: float,
        setup_timeout: float,
        heap_bytes: int,
        teams: int | None,
        scratch: Scratch | None,
        tuning: Tuning | None,
    ) -> Opening:
        """The arguments of a Communicator. Raises SetupError and DeviceError."""
        atom = atom_of(device)
        check_arguments(timeout, setup_timeout, heap_bytes, teams, scratch, tuning)
        meeting = meeting_of(group, rank, ranks)
        _check_counts(meeting.ranks, teams)
        sharing = meeting.sharing if isinstance(meeting, LocalRendezvous) else 1
        return Opening(
            meeting,
            atom,
            scratch or atom.scratch(meeting.ranks, teams=teams, sharing=sharing),
            tuning or atom.tuning,
            Settings.from_environment(),
            teams or atom.processors // sharing,
            float(timeout),
            float(setup_timeout),
        )

    def connect(self, heap_bytes: int) -> Connection:
        """Tie this rank to its peers, which do so too. Raises SetupError."""
        return Connection(
            self.meeting,
            self.atom,
            self.scratch,
            self.tuning,
            self.settings,
            heap_bytes=heap_bytes,
            blocks=self.blocks,
            timeout=self.timeout,
            setup_timeout=self.setup_timeout,
        )


def _check_counts(ranks: int, teams: int | None) -> None:
    if ranks > MAX_RANKS:
        raise SetupError(f"Communicator: needs at most {MAX_RANKS} ranks; got {ranks}. Put more on an outer mesh axis.")
    if teams is not None and not 1 <= teams <= most_teams(ranks):
        needed = f"1 to {most_teams(ranks)} `teams` with {ranks} ranks"
        raise SetupError(f"Communicator: needs {needed}; got {teams}.")
