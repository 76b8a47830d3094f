"""The scripts are imported as they import each other, and ranks are threads on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.worlds import World, local_world


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = local_world(request.param, ["cpu"], heap_bytes=1 << 20)
    yield made
    made.shut()
