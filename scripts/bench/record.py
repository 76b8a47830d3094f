"""What stands on record: a line of JSON for a rival's time on a case, and the machine and the run it is from. Needs no torch."""

from __future__ import annotations

import datetime
import json
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "scripts" / "record" / "collectives.jsonl"


@dataclass(frozen=True)
class Run:
    """Where and when."""

    run: str  # the same in all lines of one run
    date: str  # UTC, ISO 8601
    commit: str
    machine: str
    gpus: str  # as "1 x NVIDIA H200"
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Line:
    """A median over rounds of the slowest rank's time a call. A rival that cannot run has no `us` and says `why`."""

    run: str
    date: str
    commit: str
    machine: str
    gpus: str
    versions: Mapping[str, str]
    provider: str
    world: str  # local: threads of one process; processes
    collective: str
    bytes: int  # of the whole message: an all-gather's output, the others' input; of uneven shares, as if all were as large as the largest
    dtype: str
    ranks: int
    in_place: bool
    regime: str | None
    ctas: int | None
    forced: bool  # regime and ctas were asked for
    registered: bool  # granted outputs, inputs that are lent, or registered windows
    hot: bool  # all buffers in rotation fit into the L2 cache
    mode: str  # graph | eager
    us: float | None
    low_us: float | None  # fastest and slowest round
    high_us: float | None
    rounds: int
    busbw_gbps: float | None  # as nccl-tests defines it, 1e9 bytes/s
    why: str  # it has no time

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Line).items():
            value = getattr(self, name)
            allowed = get_args(kind) or (kind,)
            if kind == Mapping[str, str]:
                right = isinstance(value, dict) and all(isinstance(text, str) for text in (*value, *value.values()))
            else:
                wide = (*allowed, int) if float in allowed else allowed
                right = isinstance(value, wide) and (bool in allowed or not isinstance(value, bool))
            if not right:
                raise ValueError(f"`{name}` needs to be {kind}; got {value!r}")
        if self.world not in ("local", "processes") or self.mode not in ("graph", "eager"):
            raise ValueError(f"needs a world and a mode that are known; got {self.world!r}, {self.mode!r}")
        if (self.us is None) != bool(self.why) or (self.us is None) != (self.busbw_gbps is None):
            raise ValueError(f"needs `us` and `busbw_gbps`, or `why` there are none; got {self.us!r}, {self.why!r}")
        if self.us is not None and not 0 < self.us < float("inf"):
            raise ValueError(f"`us` needs to be positive; got {self.us!r}")


def run_of(gpus: str, versions: Mapping[str, str], *, commit: str = "") -> Run:
    """This run, on this machine."""
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    uname = _first_line("uname", "-sr")
    return Run(uuid.uuid4().hex[:12], now.isoformat(), commit or head(), uname, gpus, dict(versions))


def head() -> str:
    """The commit that is checked out, "+" where files differ from it; "unknown" without git."""
    commit = _first_line("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return commit + "+" * bool(changed) if commit else "unknown"


def _first_line(*command: str) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return (ended.stdout.splitlines() or [""])[0] if ended.returncode == 0 else ""


def append(path: Path, lines: Iterable[Line]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


def read(path: Path) -> list[Line]:
    """Raises ValueError, which names the file and the line that is no Line."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            lines.append(line_of(json.loads(text)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error
    return lines


def line_of(given: Mapping[str, Any]) -> Line:
    names = {field.name for field in fields(Line)}
    if not isinstance(given, dict) or set(given) != names:
        odd = sorted(names.symmetric_difference(given)) if isinstance(given, dict) else given
        raise ValueError(f"needs the fields of a record line; missing or unknown: {odd}")
    return Line(**given)
