"""ParallelConfig: words are checked, the product equals the world, what is not built says what is."""

from __future__ import annotations

from typing import Any

import pytest

from purlin_diffusion import ConfigError, NotBuiltError, ParallelConfig
from purlin_diffusion.config import Degrees


@pytest.mark.parametrize(
    "wrong",
    [
        {"cfg": 0},
        {"cfg": 3},
        {"sequence": -1},
        {"tensor": 1.0},
        {"patch": True},
        {"attention": "flash"},
        {"overlap": "yes"},
        {"overlap": 1},
        {"patch_mode": "stale"},
        {"warmup_steps": -1},
        {"vae": 2},
        {"graph": "yes"},
        {"graph": 1},
        {"graph_keys": 0},
        {"graph_memory": 0},
        {"graph_memory": 1.5},
        {"graph_memory": True},
        {"text": "some"},
        {"gather": "none"},
        {"backend": "nccl"},
        {"timeout": 0},
        {"timeout": True},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": 1e300},
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"`{name}` needs"):
        ParallelConfig(**wrong)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_none_chooses_all_ranks_for_the_sequence(ranks: int) -> None:
    assert ParallelConfig().degrees(ranks) == Degrees(sequence=ranks)
    assert ParallelConfig(sequence=ranks, cfg=1, tensor=1).degrees(ranks) == Degrees(sequence=ranks)


def test_cfg_is_two_halves_on_two_ranks() -> None:
    assert ParallelConfig(cfg=2).degrees(2) == ParallelConfig(cfg=2, sequence=1).degrees(2) == Degrees(cfg=2)
    for sequence in (None, 2):
        with pytest.raises(NotBuiltError, match=r"cfg=2 with sequence=2 is not built yet\. There is cfg=2 on 2 ranks"):
            ParallelConfig(cfg=2, sequence=sequence).degrees(4)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_product_of_the_degrees_is_the_world(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"product of {ranks} ranks; got sequence=2"):
        ParallelConfig(sequence=2).degrees(ranks)


@pytest.mark.parametrize(
    ("asked", "there_is"),
    [
        ({"tensor": 2}, "sequence"),
        ({"patch": 2}, "sequence"),
        ({"attention": "ring"}, "gather_kv.*ulysses"),
        ({"gather": "root"}, "all"),
        ({"patch_mode": "displaced"}, "exact"),
    ],
)
def test_what_is_not_built_says_what_is(asked: dict[str, Any], there_is: str) -> None:
    with pytest.raises(NotBuiltError, match=f"not built yet. There is .*{there_is}"):
        ParallelConfig(**asked).degrees(2)
