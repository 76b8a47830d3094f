"""One rank's call in one mode, and how ranks put theirs together."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from purlin_diffusion.commands.options import APART, Options
from purlin_diffusion.commands.picture import Seconds
from purlin_diffusion.commands.timing.likeness import Likeness
from purlin_diffusion.commands.timing.modes import Mode
from purlin_diffusion.commands.timing.profile import Profile
from purlin_diffusion.commands.timing.truth import Error
from purlin_diffusion.commands.timing.warmth import Warmth
from purlin_diffusion.commands.timing.watch import Host

T = TypeVar("T")
DEFECT = "a defect of purlin_diffusion"  # so begins what no machine and no rival is to blame for: the other modes run, and the command fails
SHOWN = 384  # pixels of a picture's longer side on the page

Visits = list[list["Visit"]]  # [process][visit]


@dataclass(frozen=True)
class Graphs:
    """How often this rank recorded and replayed in all calls of a visit, and why it did not; see graph/counts.py."""

    captures: int
    replays: int
    off: str = ""


@dataclass(frozen=True)
class Visit:
    """One rank's timed call in one mode; no seconds on a rank that had no part in it, nor where the mode `cannot`.

    `likeness`: on the root, to the one-rank image of the same repeat; `error`: there too, to what float32 says. `host`, `profile` and `picture`
    (a PNG): on the root, of the last round, which is not timed; `note`: why they are not there.
    """

    mode: Mode
    seconds: Seconds | None = None
    images: int = 1
    memory_gb: float | None = None
    warmth: tuple[Warmth, ...] = ()  # of its GPUs, right after the call
    likeness: Likeness | None = None
    error: Error | None = None
    graphs: Graphs | None = None
    host: Host | None = None
    profile: Profile | None = None
    picture: bytes | None = None
    cannot: str = ""
    note: str = ""


def together(options: Options, mine: T) -> list[T]:
    """Wait until every process is here. Returns what each has, by rank."""
    import torch.distributed as dist

    if options.mode not in APART:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def keep(sizes: Sequence[Visits], file: Path) -> None:
    """What was measured so far, for the process that started the ranks: it is there whatever becomes of them."""
    new = file.with_suffix(".new")
    new.write_bytes(pickle.dumps(list(sizes)))
    new.replace(file)


def kept(file: Path) -> list[Visits]:
    """What keep() left; nothing where it has left nothing."""
    return list(pickle.loads(file.read_bytes())) if file.exists() else []


def png(image: Any) -> bytes:
    """An h x w x 3 array in 0..1, made smaller where it is larger than a page shows."""
    from PIL import Image

    picture = Image.fromarray((image * 255).round().astype("uint8").squeeze())
    picture.thumbnail((SHOWN, SHOWN))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
