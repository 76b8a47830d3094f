"""Keys are never overwritten while they are read, compiled or not, however late a rank reads them; and the test sees it where they are."""

from __future__ import annotations

import pytest

from tests.core.worlds import world_of
from tests.diffusion.race import RANKS, Careless, outputs, wrong


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_keys_are_read_before_they_are_overwritten(how: str) -> None:
    assert wrong(outputs(lambda: world_of(RANKS, timeout=120), lambda comm: comm, how, calls=6)) == 0


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_without_a_credit_they_are_not_and_it_is_seen(how: str) -> None:
    assert wrong(outputs(lambda: world_of(RANKS, timeout=120), Careless.of_all("cpu"), how, calls=6)) > 0
