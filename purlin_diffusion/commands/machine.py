"""What a record says of where it was taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform

PACKAGES = ("purlin-diffusion", "torch", "diffusers", "transformers")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))
