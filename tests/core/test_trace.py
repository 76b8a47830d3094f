"""A trace tells what happened: as many acts as the plan says, each message told before it is seen, nothing while no trace is open."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import purlin_core
from purlin_core import ArgumentTypeError, Communicator, ConcurrentUseError, FileError, LocalWorld, StallError, prepare
from purlin_core.moves import Kind
from purlin_core.plan import Route
from purlin_core.prepare import Prepared
from purlin_core.tune import AllReduce
from tests.core.processes import Meeting, Processes
from tests.core.worlds import REGIMES, errors_of, world_of

Event = dict[str, Any]
SLOT_BYTES = 64
WORLDS = [(ranks, teams) for ranks in (2, 3) for teams in (1, 3)]


def gather(comm: Communicator) -> None:
    """Uneven, with nothing from rank 1."""
    rows = [40 + 7 * rank if rank != 1 else 0 for rank in range(comm.ranks)]
    x, out = torch.ones(rows[comm.rank], 3), comm.empty((sum(rows), 3)) if comm.stats().heap_bytes else None
    comm.redistribute(x, "n@ c -> n c", sizes={"n": rows}, out=None if out is None else out)


def total(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(501))


def lent(comm: Communicator) -> None:
    comm.all_reduce(comm.empty((501,)).fill_(1) if comm.stats().heap_bytes else torch.ones(501))


def scatter(comm: Communicator) -> None:
    comm.redistribute(torch.ones(30 * comm.ranks), "+n -> n@")


CALLS = {"gather": gather, "total": total, "lent": lent, "scatter": scatter}


def traced(world: LocalWorld, fn: Callable[[Communicator], Any], path: Path, **options: Any) -> dict[str, Any]:
    with purlin_core.trace(path, **options):
        world.run(fn)
    return read(path)


def read(path: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(path.read_text())
    assert set(written) == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in written["traceEvents"]:
        assert event["ph"] in "XMsfi" and isinstance(event["name"], str)
        assert event["ph"] == "M" or event["ts"] > 0
        assert event["ph"] != "X" or event["dur"] >= 0
    return written


def slices(written: dict[str, Any], *kinds: str) -> list[Event]:
    """Of these kinds; without any, all."""
    return [event for event in written["traceEvents"] if event["ph"] == "X" and (not kinds or event["cat"] in kinds)]


def rank_of(event: Event) -> int:
    return int(event["pid"]) % 100 - 1


def end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def message(event: Event, *, source: int, reader: int) -> tuple[Any, ...]:
    args = event["args"]
    return source, reader, args["team"], args["use"], args["message"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("ranks", "teams"), WORLDS)
def test_what_is_seen_was_told_before(ranks: int, teams: int, regime: str, call: str, tmp_path: Path) -> None:
    """For each (source, reader, team, channel, message): the notify begins before the expect ends, and that is before the consume ends."""
    with world_of(ranks, regime, teams=teams, slot_bytes=SLOT_BYTES) as world:
        written = traced(world, lambda comm: [CALLS[call](comm) for _ in range(3)], tmp_path / "t.json")
    told = {
        message(event, source=rank_of(event), reader=event["args"]["peer"]): event
        for event in slices(written, "notify", "stage")
        if event["cat"] == "notify" or event["args"]["use"] == "packet"
    }
    staged = {
        message(event, source=rank_of(event), reader=event["args"]["peer"]): event for event in slices(written, "stage")
    }
    seen = [
        event
        for event in slices(written, "expect", "consume")
        if event["args"]["peer"] >= 0 and (event["cat"] == "expect" or event["args"]["use"] == "packet")
    ]
    copied = [event for event in slices(written, "consume") if event["args"]["peer"] >= 0]
    assert told and staged.keys() == told.keys()
    for event in seen:
        key = message(event, source=event["args"]["peer"], reader=rank_of(event))
        assert told[key]["ts"] <= end(event)
        assert staged[key]["ts"] <= end(event)
    for event in copied:
        key = message(event, source=event["args"]["peer"], reader=rank_of(event))
        assert told[key]["ts"] <= end(event) and staged[key]["args"]["wire_bytes"] == event["args"]["wire_bytes"]


@pytest.mark.parametrize(("ranks", "teams"), WORLDS)
def test_a_role_of_its_own_copies_the_same_at_home(ranks: int, teams: int, tmp_path: Path) -> None:
    def call(comm: Communicator, parts: int) -> Tensor:
        x = torch.arange(101.0) + 1000 * comm.rank
        prepared = comm.plan([x], "n@ -> n", call="redistribute")
        prepared.native = comm._calls.tie.site.plan({**prepared.arguments, "parts": parts})
        out = comm.redistribute(x, "n@ -> n")
        assert prepared.calls == 1
        return out

    acts = []
    for parts in (1, 2, 3):
        with world_of(ranks, "staged", teams=teams, slot_bytes=SLOT_BYTES) as world:
            path = tmp_path / f"{parts}.json"
            with purlin_core.trace(path):
                outs = world.run(lambda comm, parts=parts: call(comm, parts))
        assert all(torch.equal(out, torch.cat([torch.arange(101.0) + 1000 * r for r in range(ranks)])) for out in outs)
        all_acts = slices(read(path), "own", "stage", "notify", "expect", "consume")
        acts.append(
            Counter((rank_of(act), act["cat"], act["args"]["team"], act["args"]["wire_bytes"]) for act in all_acts)
        )
        assert sum(act["args"]["wire_bytes"] for act in all_acts if act["cat"] == "own") >= ranks * 4 * 101
    assert acts[0] == acts[1] == acts[2]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("ranks", "teams"), WORLDS)
def test_every_message_has_one_arrow(ranks: int, teams: int, regime: str, call: str, tmp_path: Path) -> None:
    """As many as were staged, each from a slice of the one rank to a slice of the other; beside them one for each grant."""
    with world_of(ranks, regime, teams=teams, slot_bytes=SLOT_BYTES) as world:
        written = traced(world, CALLS[call], tmp_path / "t.json")
    arrows = [event for event in written["traceEvents"] if event["ph"] in "sf"]
    begins, ends = ({event["id"]: event for event in arrows if event["ph"] == ph} for ph in "sf")
    assert len(arrows) == 2 * len(begins) and begins.keys() == ends.keys()
    named = Counter(event["name"] for event in begins.values())
    assert named["message"] == len(slices(written, "stage")) > 0
    assert named["grant"] == len(slices(written, "grant"))
    assert bool(named["grant"]) == (regime == "direct" and call in ("gather", "lent"))
    for number, begin in begins.items():
        assert begin["pid"] != ends[number]["pid"] and begin["ts"] <= ends[number]["ts"] and ends[number]["bp"] == "e"
        for arrow in (begin, ends[number]):
            assert any(
                event["pid"] == arrow["pid"]
                and event["tid"] == arrow["tid"]
                and event["ts"] <= arrow["ts"] <= end(event)
                for event in written["traceEvents"]
                if event["ph"] == "X"
            )


def messages(route: Route, prepared: Prepared) -> int:
    """Chunks of a route, from its bytes and the inbox alone."""
    share = max(16, -(-route.bytes // prepared.schedule.teams))
    chunk = -(-share // 16) * 16
    if prepared.schedule.regime.name == "STAGED":
        chunk = min(chunk, SLOT_BYTES)
    return -(-route.bytes // chunk)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("ranks", "teams"), WORLDS)
def test_there_are_as_many_slices_as_the_plan_says(
    ranks: int, teams: int, regime: str, call: str, tmp_path: Path
) -> None:
    with world_of(ranks, regime, teams=teams, slot_bytes=SLOT_BYTES) as world:
        written = traced(world, CALLS[call], tmp_path / "t.json")
        plans = [comm._calls.last for comm in world.communicators]
    for rank, prepared in enumerate(plans):
        assert prepared is not None
        mine = [event for event in slices(written, "stage", "notify", "expect", "let_go") if rank_of(event) == rank]
        counts = Counter(event["cat"] for event in mine)
        peers = [peer for peer in range(ranks) if peer != rank]
        moves = prepared.moves
        sent = sum(messages(moves.send[peer], prepared) for peer in peers)
        received = sum(messages(moves.receive[peer], prepared) for peer in peers)
        if moves.kind is Kind.REDUCE:
            received = len(peers) * messages(moves.own_from, prepared)
        regime_taken = prepared.schedule.regime.name
        if moves.kind is Kind.ALL_REDUCE:  # my slice comes in from each peer or is read there; its sum goes out
            through = len(peers) * messages(moves.own_from, prepared)
            lent = regime_taken == "DIRECT"
            sent, received = (through, received) if lent else (sent + through, received + through)
        assert counts["stage"] == sent
        assert counts["notify"] == (0 if regime_taken == "PACKET" else sent)
        assert counts["expect"] == (0 if regime_taken == "PACKET" else received)
        assert counts["let_go"] == (received if regime_taken == "STAGED" else 0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("ranks", "teams"), WORLDS)
def test_a_sum_in_one_exchange_is_told_once_a_message(
    ranks: int, teams: int, in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two GPUs do it. What the roles of a rank tell each other in place is no message."""
    monkeypatch.setattr(prepare, "how_all_reduce", lambda *_: AllReduce.ONE_SHOT)

    def call(comm: Communicator) -> None:
        x = torch.arange(501.0) * (comm.rank + 1)
        out = comm.redistribute(x, "+n -> n", out=x if in_place else None)
        assert torch.equal(out, torch.arange(501.0) * sum(range(ranks + 1)))

    with world_of(ranks, "staged", teams=teams, slot_bytes=SLOT_BYTES) as world:
        written = traced(world, call, tmp_path / "t.json")
        plans = [comm._calls.last for comm in world.communicators]
    for rank, prepared in enumerate(plans):
        assert prepared is not None and prepared.overlapping == in_place
        acts = Counter(event["cat"] for event in slices(written) if rank_of(event) == rank)
        sent = (ranks - 1) * messages(prepared.moves.own_from, prepared)
        assert [acts[act] for act in ("stage", "notify", "expect", "let_go")] == [sent] * 4, acts


@pytest.mark.parametrize("regime", REGIMES)
def test_a_call_is_a_slice_named_by_its_spec_around_its_acts(regime: str, tmp_path: Path) -> None:
    with world_of(2, regime, teams=2) as world:
        written = traced(world, lambda comm: [gather(comm), gather(comm)], tmp_path / "t.json")
        plans = [comm._calls.last for comm in world.communicators]
    for rank, prepared in enumerate(plans):
        assert prepared is not None
        calls = [event for event in slices(written, "call") if rank_of(event) == rank]
        assert [event["name"] for event in calls] == [
            prepared.text
        ] * 2 and 'redistribute "n@ c -> n c"' in prepared.text
        for event in calls:
            args = event["args"]
            assert args["regime"] == regime and args["sent_bytes"] == prepared.sent_bytes and args["teams"] == 2
            assert args["received_bytes"] == prepared.received_bytes
            acts = [e for e in written["traceEvents"] if e["ph"] == "X" and e["cat"] != "call" and rank_of(e) == rank]
            inside = [act for act in acts if act["args"]["call"] == args["call"]]
            assert inside and all(event["ts"] <= act["ts"] and end(act) <= end(event) for act in inside)


@pytest.mark.parametrize("teams", [1, 3])
def test_slices_of_a_track_follow_each_other(teams: int, tmp_path: Path) -> None:
    """One slice ends before the next begins, in every track; and each track has a name of its own."""
    with world_of(3, "staged", teams=teams) as world:
        written = traced(world, total, tmp_path / "t.json")
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in written["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in tracks.values():
        track.sort(key=lambda event: event["ts"])
        assert all(end(before) <= after["ts"] + 1e-3 for before, after in pairwise(track))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"}
    assert named.keys() == tracks.keys() and len(tracks) == 3 * (1 + 2 * teams)
    assert all(len({name for (pid, _), name in named.items() if pid == each}) == 1 + 2 * teams for each in (1, 2, 3))


def test_a_trace_of_nothing_is_a_file(tmp_path: Path) -> None:
    with purlin_core.trace(tmp_path / "deep" / "t.json"):
        pass
    assert read(tmp_path / "deep" / "t.json")["traceEvents"] == []


def test_nothing_is_recorded_while_no_trace_is_open(tmp_path: Path) -> None:
    with world_of(2, "staged") as world:
        world.run(total)
        with purlin_core.trace(tmp_path / "a.json") as first:
            pass
        world.run(total)
        assert slices(read(tmp_path / "a.json"), "call", "stage") == [] and len(first.recorders) == 2
        assert all(not recorder.calls and not recorder.acts() for recorder in first.recorders)
        assert all(comm._calls.tie.bare and comm._calls.tie.recorder is None for comm in world.communicators)


def test_a_second_trace_begins_anew(tmp_path: Path) -> None:
    with world_of(2, "staged") as world:
        first, second = (traced(world, total, tmp_path / f"{name}.json") for name in "ab")
    calls = [[event["args"]["call"] for event in slices(each, "call")] for each in (first, second)]
    assert calls == [[1, 1], [2, 2]]
    assert len(slices(first, "stage")) == len(slices(second, "stage")) > 0


def test_a_trace_inside_a_trace_is_refused_and_the_outer_one_goes_on(tmp_path: Path) -> None:
    with world_of(2, "packet") as world, purlin_core.trace(tmp_path / "outer.json"):
        with (
            pytest.raises(ConcurrentUseError, match=r"outer\.json' is open"),
            purlin_core.trace(tmp_path / "in.json"),
        ):
            pass
        world.run(total)
    assert len(slices(read(tmp_path / "outer.json"), "call")) == 2 and not (tmp_path / "in.json").exists()


def test_lost_acts_are_counted_and_shown(tmp_path: Path) -> None:
    with world_of(2, "staged", slot_bytes=SLOT_BYTES) as world:
        whole = traced(world, total, tmp_path / "whole.json")
        acts = [event for event in whole["traceEvents"] if event["ph"] == "X" and event["cat"] != "call"]
        with purlin_core.trace(tmp_path / "part.json", acts=5) as part:
            world.run(total)
    written = read(tmp_path / "part.json")
    kept = [event for event in written["traceEvents"] if event["ph"] == "X" and event["cat"] != "call"]
    assert len(kept) == 10 and written["otherData"]["lost"] == part.lost == len(acts) - 10 > 0
    notes = [event for event in written["traceEvents"] if event["ph"] == "i"]
    assert len(notes) == 2 and all("lost" in note["name"] for note in notes)
    newest = {rank: max(end(event) for event in kept if rank_of(event) == rank) for rank in (0, 1)}
    calls = {rank_of(event): event for event in slices(written, "call")}
    assert all(calls[rank]["ts"] < newest[rank] <= end(calls[rank]) for rank in (0, 1))


def test_communicators_made_and_closed_inside_are_recorded(tmp_path: Path) -> None:
    with purlin_core.trace(tmp_path / "t.json"):
        for _ in range(2):
            with world_of(2, "direct") as world:
                world.run(gather)
                world.run(lambda comm: comm.reserve(1 << 21))
                world.run(gather)
    written = read(tmp_path / "t.json")
    assert len(slices(written, "call")) == 8
    assert len({event["pid"] for event in slices(written, "call")}) == 8  # a world, and another after reserve(), twice
    arrows = Counter(event["id"] for event in written["traceEvents"] if event["ph"] in "sf")
    assert set(arrows.values()) == {2}


def test_a_failed_call_is_in_the_file(tmp_path: Path) -> None:
    with world_of(2, "staged", timeout=0.3) as world:
        with purlin_core.trace(tmp_path / "t.json"):
            errors = errors_of(world, lambda comm: total(comm) if comm.rank == 0 else None)
        assert isinstance(errors[0], StallError)
    (call,) = slices(read(tmp_path / "t.json"), "call")
    assert call["args"]["failed"] > 0 and rank_of(call) == 0


def test_an_exception_inside_passes_and_the_file_is_written(tmp_path: Path) -> None:
    with world_of(2, "packet") as world:

        def fails() -> None:
            with purlin_core.trace(tmp_path / "t.json"):
                world.run(total)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert len(slices(read(tmp_path / "t.json"), "call")) == 2
        assert len(slices(traced(world, total, tmp_path / "next.json"), "call")) == 2


def test_results_are_the_same_under_a_trace(tmp_path: Path) -> None:
    def work(comm: Communicator) -> Tensor:
        generator = torch.Generator().manual_seed(comm.rank)
        return comm.all_reduce(torch.randn(1000, generator=generator))

    for regime in REGIMES:
        with world_of(3, regime, teams=2) as world:
            plain = world.run(work)
            with purlin_core.trace(tmp_path / "t.json"):
                under = world.run(work)
            assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


def test_a_trace_may_begin_and_end_while_ranks_call(tmp_path: Path) -> None:
    """Calls go on in other threads; each file is whole."""
    going = True

    def work(comm: Communicator) -> int:
        calls = 0
        while comm.all_reduce(torch.tensor([float(going)]), "min").item():
            calls += 1
        return calls

    with world_of(2, "packet") as world:
        done: list[list[int]] = []
        thread = threading.Thread(target=lambda: done.append(world.run(work)))
        thread.start()
        try:
            for turn in range(20):
                with purlin_core.trace(tmp_path / f"{turn}.json", acts=50):
                    threading.Event().wait(0.002)
                read(tmp_path / f"{turn}.json")
        finally:
            going = False
            thread.join(30)
    assert done and done[0][0] == done[0][1] > 0


@pytest.mark.parametrize("acts", [0, -1, 1.5, True, "many"])
def test_a_wrong_count_is_named(acts: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(ArgumentTypeError, match=r"trace: `acts` needs a count"),
        purlin_core.trace(tmp_path / "t", acts=acts),
    ):
        pass


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("{}", "Is a directory"),
        ("{}/file/t.json", "Not a directory"),
        ("/proc/t.json", "(No such file|Permission denied)"),
        ("/proc/new/t.json", "(No such file|Permission denied)"),
        ("{}/" + "x" * 300, "File name too long"),
        ("{}/\0", "null byte"),
    ],
)
def test_a_path_that_cannot_be_is_named_before_anything_runs(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = f"trace: `path` needs the name of a file that can be written; got .*{why}.*Pass another."
    with pytest.raises(FileError, match=message) as caught, purlin_core.trace(path.format(tmp_path)):
        pytest.fail("the work was begun")
    assert isinstance(caught.value, OSError)
    assert [place.name for place in tmp_path.iterdir()] == ["file"]
    with purlin_core.trace(tmp_path / "t.json"):  # none is open
        pass


@pytest.mark.parametrize("path", [None, 3, b"t.json"])
def test_a_path_of_a_wrong_type_is_named(path: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="trace: `path` needs a path; got"), purlin_core.trace(path):
        pytest.fail("the work was begun")


def test_a_folder_is_made_with_the_file(tmp_path: Path) -> None:
    with purlin_core.trace(tmp_path / "new" / "newer" / "t.json") as trace:
        assert not list(tmp_path.iterdir())
    assert read(trace.file)


def test_a_place_lost_meanwhile_is_named_and_hides_no_exception(tmp_path: Path) -> None:
    def lose(error: Exception | None) -> None:
        with purlin_core.trace(tmp_path / "t.json"):
            (tmp_path / "t.json").mkdir(exist_ok=True)
            if error is not None:
                raise error

    with pytest.raises(FileError, match="Is a directory"):
        lose(None)
    (tmp_path / "t.json").rmdir()
    with pytest.raises(ZeroDivisionError):
        lose(ZeroDivisionError())
    (tmp_path / "t.json").rmdir()
    with purlin_core.trace(tmp_path / "t.json"):  # none is open
        pass


def traced_process(rank: int, meeting: Meeting) -> str:
    with meeting.communicator(rank) as comm, purlin_core.trace(meeting.folder / "t.json") as trace:
        comm.all_reduce(torch.ones(1000))
    return trace.file.name


def test_processes_write_a_file_each(tmp_path: Path) -> None:
    with Meeting.of(2, tmp_path) as meeting, Processes(2, traced_process, meeting) as processes:
        assert processes.answers() == ["t.rank0.json", "t.rank1.json"]
    whole = [read(tmp_path / f"t.rank{rank}.json") for rank in range(2)]
    for rank, written in enumerate(whole):
        assert {rank_of(event) for event in slices(written, "call", "stage")} == {rank}
    told = {message(e, source=rank_of(e), reader=e["args"]["peer"]): e for e in slices(whole[0], "notify")}
    seen = {message(e, source=e["args"]["peer"], reader=rank_of(e)): e for e in slices(whole[1], "expect")}
    assert told.keys() == seen.keys() and all(told[key]["ts"] <= end(seen[key]) for key in told)  # one clock


# ---- ranges for profilers


def ranges(prof: profile) -> Iterator[str]:
    return (event.name for event in prof.events() or () if event.name.startswith("purlin "))


def test_calls_are_ranges_where_a_profiler_runs() -> None:
    with world_of(2, "packet") as world:
        comms = world.communicators
        x = [torch.ones(5), torch.ones(5)]
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            other = threading.Thread(target=lambda: comms[1].all_reduce(x[1]))
            other.start()
            comms[0].all_reduce(x[0])
            other.join()
        text = comms[0]._calls.last.text if comms[0]._calls.last else ""
        assert f"purlin {text}" in set(ranges(prof)) and 'all_reduce "+d0 -> d0" (d0=5)' in text
        with profile(activities=[ProfilerActivity.CPU]) as idle:
            pass
        assert not list(ranges(idle))


def test_ranges_and_a_trace_go_together(tmp_path: Path) -> None:
    with world_of(2, "packet") as world, profile(activities=[ProfilerActivity.CPU]):
        assert len(slices(traced(world, total, tmp_path / "t.json"), "call")) == 2
