"""Every environment variable the core reads or sets, in one place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

VERSION = (
    2  # of the protocol and of what ranks tell each other at set-up; ranks of different versions refuse each other
)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. Ranks compare theirs at set-up."""

    check: bool  # PURLIN_CHECK=1: canaries behind every region that peers write, and outputs poisoned before each call

    @staticmethod
    def from_environment() -> Settings:
        return Settings(check=os.environ.get("PURLIN_CHECK", "0") not in ("", "0"))


@contextmanager
def overlay(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for a while: what is read, or started, meanwhile sees them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def plain_rendezvous() -> AbstractContextManager[None]:
    """While torch's symmetric memory is mapped: no multicast, which we never use, and GPUs told apart by us.

    Processes that each see one GPU (CUDA_VISIBLE_DEVICES) all call theirs 0, and torch would take them for one.
    """
    return overlay({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"})


def ask_for_queues() -> None:
    """Before CUDA starts: a hardware queue for every stream, or kernels of ranks that share a GPU can stand behind each other."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
