"""The progress bar through which a loop is seen: given back, used as ever, one a pipeline."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from purlin_diffusion import Handle, parallelize
from tests.diffusion.ahead.counters import Gpu


@pytest.mark.parametrize("own", [False, True])
def test_undo_gives_the_bar_back(pipe: Any, gpus: list[Gpu], own: bool) -> None:
    if own:
        pipe.progress_bar = type(pipe).progress_bar.__get__(pipe)
    before = dict(vars(pipe))
    handle = parallelize(pipe, devices=2)
    assert vars(pipe)["progress_bar"] is handle.loop
    handle.undo()
    assert vars(pipe) == before


def test_a_bar_is_used_as_ever(pipe: Any, gpus: list[Gpu]) -> None:
    handle = parallelize(pipe, devices=2)
    assert list(pipe.progress_bar([3, 1])) == [3, 1]
    bar = pipe.progress_bar(total=2)
    bar.update()
    with bar as same:
        assert same.total == bar.total == 2
    with pytest.raises(ValueError, match="has to be defined"):
        pipe.progress_bar()
    handle.undo()


def test_a_copy_of_the_pipeline_has_a_bar_of_its_own(pipe: Any, gpus: list[Gpu]) -> None:
    handle: Handle = parallelize(pipe, devices=2)
    twin = object.__new__(type(pipe))
    assert handle.loop is not None
    assert copy.deepcopy(handle.loop, {id(pipe): twin}).__self__ is twin
    handle.undo()


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_gpu_the_bar_is_let_alone(pipe: Any, ranks: int) -> None:
    before = dict(vars(pipe))
    handle = parallelize(pipe, devices=ranks)
    assert vars(pipe) == before and handle.loop is None
    handle.undo()
