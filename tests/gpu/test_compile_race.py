"""On a GPU, too: keys that a peer writes from another stream are never overwritten while they are read, compiled or not; and the test sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from purlin_core import LocalWorld
from tests.core.worlds import REGIMES, regimes_of
from tests.diffusion.race import RANKS, Careless, outputs, wrong
from tests.gpu.devices import DEVICE, gpu_world

pytestmark = pytest.mark.gpu

# A kernel that is loaded while a peer's waits can hang: eager calls come first, and compiled ones run the same kernels.
HOWS = ["eager", "aot_eager"]


@contextmanager
def streams(regime: str) -> Iterator[LocalWorld]:
    """Two ranks on streams of their own, whose exchanges take `regime`: where it is direct, peers write the very tensors that are read."""
    with gpu_world(RANKS, "streams", regime, granted_results=regime == "direct", timeout=120) as world:
        yield world
        assert regimes_of(world) == {regime}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("how", HOWS)
def test_keys_are_read_before_they_are_overwritten(how: str, regime: str) -> None:
    assert wrong(outputs(partial(streams, regime), lambda comm: comm, how, calls=6)) == 0


@pytest.mark.parametrize("how", HOWS)
def test_without_a_credit_they_are_not_and_it_is_seen(how: str) -> None:
    assert wrong(outputs(partial(gpu_world, RANKS, "streams"), Careless.of_all(DEVICE), how, calls=6)) > 0
