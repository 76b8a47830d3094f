"""One run on two ranks, for all who only look at it."""

from __future__ import annotations

import pytest

from purlin_diffusion.commands.timing.rows import Result
from tests.latency.runs import measured


@pytest.fixture(scope="session")
def two() -> Result:
    return measured("--ranks", "2", "--threads")
