"""Every reason for which a GPU, or several, cannot be used, as torch and the driver tell it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from purlin_core import DeviceError, SetupError, _cpu, cuda
from purlin_core.cuda_memory import ThreadMemory
from purlin_core.terms import check_cards

# ---- a GPU that cannot be used


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with one good GPU, as torch and the driver tell it."""
    machine = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid="GPU-1", multi_processor_count=132)
    monkeypatch.setattr(cuda, "_module", lambda: _cpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: machine)
    monkeypatch.setattr(cuda, "_driver_version", lambda: 13000)
    return machine


def test_a_good_gpu_is_opened(gpu: SimpleNamespace) -> None:
    atom = cuda.open_cuda(torch.device("cuda", 0))
    assert (atom.device, atom.identity, atom.processors) == (torch.device("cuda:0"), "GPU-1", 132)
    assert [atom.scratch(8, teams=None, sharing=n).teams for n in (1, 8, 200)] == [32, 16, 1]
    assert atom.scratch(2, teams=5, sharing=1).teams == 5


def no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("importlib.import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name)))


def a_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "_driver_version", lambda: 0)


def an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "_driver_version", lambda: 12040)


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: old)


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (no_module, "built without CUDA.*PURLIN_CUDA=ON pip install"),
        (a_cpu_torch, "is a CPU build. Install a CUDA build"),
        (no_driver, "no NVIDIA driver is loaded"),
        (an_old_driver, "too old: it knows CUDA 12.4, and torch was built for 13.0.*580"),
        (no_gpu, "torch sees no GPU.*CUDA_VISIBLE_DEVICES"),
        (an_old_gpu, r"'cuda:0' \(Tesla T4\) is sm_75; purlin needs sm_80"),
    ],
)
def test_why_a_gpu_cannot_be_used(lack: Any, words: str, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch)
    with pytest.raises(DeviceError, match=words):
        cuda.open_cuda(torch.device("cuda", 0))


def test_a_gpu_that_is_not_there_is_named(gpu: SimpleNamespace) -> None:
    with pytest.raises(DeviceError, match="there is no 'cuda:3'; torch sees 1 GPU"):
        cuda.open_cuda(torch.device("cuda", 3))


# ---- GPUs that do not fit together


class OnGpu:
    """As much of an Atom as is looked at."""

    device = torch.device("cuda", 0)


def card(rank: int, **changes: Any) -> dict[str, Any]:
    machine = os.uname().nodename
    return {"machine": machine, "pid": rank, "device": "cuda:0", "identity": f"GPU-{rank}", "terms": {}} | changes


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([card(0), card(1, identity="GPU-0")], "ranks 0 and 1 are both on GPU GPU-0.*LocalWorld"),
        ([card(0), card(1, pid=0)], "ranks 0 and 1 on 'cuda:0' are of one process.*LocalWorld"),
        ([card(0), card(1, machine="elsewhere")], "a peer is on 'elsewhere'"),
        ([card(0, terms={"tuning": "a"}), card(1, terms={"tuning": "b"})], "the same `tuning`; rank 0 has 'a', rank 1"),
    ],
)
def test_processes_that_do_not_fit_are_named(cards: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        check_cards(cards, OnGpu(), local=False)  # type: ignore[arg-type]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_without_access_are_named_and_those_that_are_not_visible_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: False)
    with pytest.raises(SetupError, match=r"GPU 0 cannot reach the memory of GPU 1 \(no P2P\)"):
        check_cards([card(0), card(1)], OnGpu(), local=False)  # type: ignore[arg-type]
    check_cards([card(0), card(1, identity="GPU-5")], OnGpu(), local=False)  # type: ignore[arg-type]


def test_threads_whose_gpus_have_no_access_are_refused_on_every_rank() -> None:
    reached: list[int] = []
    native = SimpleNamespace(can_reach=lambda one, other: (one, other) != (1, 2), reach=reached.append)
    arenas: list[Any] = [SimpleNamespace(device=torch.device("cuda", i)) for i in range(3)]
    for rank, arena in enumerate(arenas):
        with pytest.raises(SetupError, match="GPU 1 cannot reach the memory of GPU 2"):
            ThreadMemory(native, arena.device).map(arena, rank, arenas, [1, 1, 1])
    assert not reached
    native.can_reach = lambda one, other: True
    assert ThreadMemory(native, arenas[1].device).map(arenas[1], 1, arenas, [1, 1, 1]) == arenas
    assert reached == [0, 2]
