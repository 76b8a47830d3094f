"""Recorded calls and acts as a Chrome trace, JSON that Perfetto shows: slices, tracks, arrows. Times in microseconds of the machine's clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from purlin_core.recorder import Act, Called, Recorder, Use, What

Event: TypeAlias = dict[str, Any]

WORLD_PIDS = 100  # more than a world has ranks
HOST_TRACK, GPU_TRACK, TEAM_TRACKS = 0, 1, 2
KERNELS = (
    "calls on GPUs are recorded from the host's side: kernels look at no clock, and replays of CUDA graphs are not seen"
)

_NAMES = {
    What.STAGE: "stage for {}",
    What.NOTIFY: "notify {}",
    What.EXPECT: "expect of {}",
    What.CONSUME: "consume of {}",
    What.LET_GO: "let go to {}",
    What.GRANT: "grant to {}",
    What.OWN: "own",
}


def chrome(recorders: Sequence[Recorder]) -> dict[str, Any]:
    """The whole file. `otherData` says what was lost, and that kernels keep no clock where there is a GPU."""
    pids = _pids(recorders)
    events = [event for recorder in recorders for event in _of_rank(recorder, pids[recorder])]
    notes = {"clock": "CLOCK_MONOTONIC", "lost": sum(recorder.lost for recorder in recorders)}
    kernels = {"kernels": KERNELS} if any(recorder.device.type != "cpu" for recorder in recorders) else {}
    return {"traceEvents": [*events, *_arrows(recorders, pids)], "displayTimeUnit": "ns", "otherData": notes | kernels}


def _pids(recorders: Sequence[Recorder]) -> dict[Recorder, int]:
    """A process a rank of each world."""
    worlds = {world: n for n, world in enumerate(dict.fromkeys(recorder.world for recorder in recorders))}
    return {recorder: worlds[recorder.world] * WORLD_PIDS + recorder.rank + 1 for recorder in recorders}


def _of_rank(recorder: Recorder, pid: int) -> Iterator[Event]:
    name = f"rank {recorder.rank} of {recorder.ranks} on {recorder.device}, communicator {pid // WORLD_PIDS + 1}"
    yield _about(pid, 0, "process_name", name=name)
    yield _about(pid, 0, "process_sort_index", sort_index=pid)
    yield _about(pid, HOST_TRACK, "thread_name", name="calls")
    for called in recorder.calls:
        yield _call(called, called.begin, called.end, pid, HOST_TRACK)
        if (there := recorder.on_device(called)) is not None:
            yield _call(called, *there, pid, GPU_TRACK)
    if recorder.device.type != "cpu":
        yield _about(pid, GPU_TRACK, "thread_name", name="calls on the GPU, by events around them")
    acts = recorder.acts()
    for track, name in sorted({(_track(act), _role(act)) for act in acts}):
        yield _about(pid, track, "thread_name", name=name)
        yield _about(pid, track, "thread_sort_index", sort_index=track)
    yield from (_slice(act, pid) for act in acts if act.what is not What.COME)
    if recorder.lost:
        first = min([act.begin for act in acts] + [called.begin for called in recorder.calls], default=0)
        text = f"{recorder.lost} earlier acts or calls were lost"
        yield {"name": text, "ph": "i", "s": "p", "ts": first / 1e3, "pid": pid, "tid": HOST_TRACK}


def _call(called: Called, begin: int, end: int, pid: int, track: int) -> Event:
    prepared = called.prepared
    facts = {
        "call": called.number,
        "regime": prepared.schedule.regime.name.lower(),
        "teams": prepared.schedule.teams,
        "sent_bytes": prepared.sent_bytes,
        "received_bytes": prepared.received_bytes,
        "why": prepared.schedule.why,
    }
    if called.code:
        facts["failed"] = called.code
    if called.captured:
        facts["captured"] = "into a CUDA graph, not run"
    return _complete(prepared.text, "call", begin, end, pid, track, facts)


def _slice(act: Act, pid: int) -> Event:
    facts = {
        "call": act.call,
        "team": act.team,
        "step": act.step,
        "peer": act.peer,
        "use": act.use.name.lower(),
        "message": act.message,
        "wire_bytes": act.wire_bytes,
    }
    return _complete(_name(act), act.what.name.lower(), act.begin, act.end, pid, _track(act), facts)


def _name(act: Act) -> str:
    if act.what is What.WAIT:
        return f"wait for {act.peer}'s {'grant' if act.use is Use.DIRECT else 'credit'}"
    return _NAMES[act.what].format("all" if act.peer < 0 else act.peer)


def _arrows(recorders: Sequence[Recorder], pids: Mapping[Recorder, int]) -> Iterator[Event]:
    """From where a message or a grant was told to where it was seen, when both are here."""
    told, seen = {}, {}
    for recorder in recorders:
        for act in recorder.acts():
            if (key := _told(act, recorder)) is not None:
                told[key] = act, pids[recorder]
            elif (key := _seen(act, recorder)) is not None:
                seen[key] = act, pids[recorder]
    for number, key in enumerate(key for key in told if key in seen):
        (source, source_pid), (reader, reader_pid) = told[key], seen[key]
        arrow = {"name": key[-1], "cat": "message", "id": number}
        yield arrow | {"ph": "s", "ts": source.begin / 1e3, "pid": source_pid, "tid": _track(source)}
        at = max(source.begin, reader.end - 1) / 1e3  # within the slice, which ends at `end`
        yield arrow | {"ph": "f", "bp": "e", "ts": at, "pid": reader_pid, "tid": _track(reader)}


def _told(act: Act, recorder: Recorder) -> tuple[Any, ...] | None:
    """What a rank told a peer, as both name it."""
    packet = act.use is Use.PACKET and act.what is What.STAGE
    if packet or act.what in (What.NOTIFY, What.GRANT):
        kind = "grant" if act.what is What.GRANT else "message"
        return recorder.world, recorder.rank, act.peer, act.team, act.use, act.message, kind
    return None


def _seen(act: Act, recorder: Recorder) -> tuple[Any, ...] | None:
    grant = act.use is Use.DIRECT and act.what is What.WAIT
    packet = act.use is Use.PACKET and act.what is What.CONSUME and act.peer >= 0
    if grant or packet or act.what in (What.EXPECT, What.COME):
        return recorder.world, act.peer, recorder.rank, act.team, act.use, act.message, "grant" if grant else "message"
    return None


def _track(act: Act) -> int:
    return TEAM_TRACKS + 2 * act.team + (not act.staging)


def _role(act: Act) -> str:
    return f"team {act.team}: {'stage' if act.staging else 'consume'}"


def _complete(name: str, kind: str, begin: int, end: int, pid: int, track: int, facts: Mapping[str, Any]) -> Event:
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {"name": name, "cat": kind, "ph": "X", **times, "pid": pid, "tid": track, "args": dict(facts)}


def _about(pid: int, tid: int, what: str, **facts: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": facts}
