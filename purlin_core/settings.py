"""Every environment variable the core reads, in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass

VERSION = (
    1  # of the protocol and of what ranks tell each other at set-up; ranks of different versions refuse each other
)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. Ranks compare theirs at set-up."""

    check: bool  # PURLIN_CHECK=1: canaries behind every region that peers write, and outputs poisoned before each call

    @staticmethod
    def from_environment() -> Settings:
        return Settings(check=os.environ.get("PURLIN_CHECK", "0") not in ("", "0"))
