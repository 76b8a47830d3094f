"""Pipelines by name: a trained one in a few MB, public ones at full size with random weights, tiny ones, a folder, the hub.

    pipe = load("digits")
    image = pipe("digit three", **defaults("digits")).images[0]

A family is one file (flux.py, sd3.py, qwenimage.py) with `tiny` and `full` builders and its `ENTRIES`; nothing here needs a network but
a hub id, and diffusers, whose import takes seconds, comes with the first pipeline that is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import flux, qwenimage, sd3
from .entry import Entry

DIGITS = Path(__file__).parent / "digits"  # scripts/train_digits.py makes it
CALL = "call.json"  # in a pipeline's folder: arguments of its call that suit it

ENTRIES: Mapping[str, Entry] = {**flux.ENTRIES, **sd3.ENTRIES, **qwenimage.ENTRIES}


class UnknownPipelineError(ValueError):
    """A name that stands for no pipeline."""


def names() -> list[str]:
    """All names `load` knows, beside folders and hub ids."""
    return ["digits", *ENTRIES]


def check(name_or_path: str) -> None:
    """Raise UnknownPipelineError now if `load` would later; whether the hub has an id is not asked."""
    if name_or_path not in names() and _folder(name_or_path) is None and not _is_hub_id(name_or_path):
        raise UnknownPipelineError(_unknown(name_or_path))


def load(name_or_path: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Any:
    """The diffusers pipeline that a name stands for, on `device`, in eval mode.

    name_or_path: "digits", "tiny:NAME", "random:NAME" (`names()` lists them), a folder that `save_pretrained` wrote, or a
        hub id "owner/name". Of a "random:" pipeline the denoiser and the VAE have their real size and the text encoders
        are small: its speed is real, its pictures are noise. Weights are made in `dtype`, on `device`, without a copy.
    dtype: of the weights; None: float32, and bfloat16 for "random:".

    Raises UnknownPipelineError.
    """
    check(name_or_path)
    entry = ENTRIES.get(name_or_path)
    if entry is not None:
        return entry.build(dtype=dtype or entry.dtype, device=torch.device(device))
    from diffusers import DiffusionPipeline

    source = DIGITS if name_or_path == "digits" else name_or_path
    return DiffusionPipeline.from_pretrained(source, dtype=dtype or torch.float32).to(device)


def defaults(name_or_path: str) -> dict[str, Any]:
    """Arguments of the pipeline's call that suit it (size, steps, guidance, ...; never the prompt); {} where none are known.

    Raises UnknownPipelineError.
    """
    check(name_or_path)
    if entry := ENTRIES.get(name_or_path):
        return dict(entry.call)
    folder = _folder(name_or_path)
    if folder is None or not (folder / CALL).exists():
        return {}
    call: dict[str, Any] = json.loads((folder / CALL).read_text())
    return call


def about(name_or_path: str) -> str:
    """One line for a report: what this pipeline is, and what of it is not the real thing. Raises UnknownPipelineError."""
    check(name_or_path)
    if entry := ENTRIES.get(name_or_path):
        return entry.about
    if name_or_path == "digits":
        return "a tiny FLUX.1, trained on handwritten digits"
    return f"{'the folder' if _folder(name_or_path) else 'from the hub,'} {name_or_path}"


def _folder(name_or_path: str) -> Path | None:
    """Where the pipeline lies on disk; None when it does not."""
    folder = DIGITS if name_or_path == "digits" else Path(name_or_path)
    return folder if (folder / "model_index.json").is_file() else None


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None and not Path(name).exists()


def _unknown(name: str) -> str:
    known = ", ".join(names())
    missing = ": the folder has no model_index.json (make it with save_pretrained)" if Path(name).is_dir() else ""
    return f"needs one of {known}, a folder with a pipeline, or a hub id like owner/name; got {name!r}{missing}"
