"""Takes each guard of the protocol away in turn and shows that a test notices.

A guard is a wait, a release or acquire, a credit, a comparison, an order of two steps. Each mutant is a small edit of
one file; the program named beside it must fail, and the table says after how many seeds. A mutant that survives means
that its guard is not tested (or not needed): exit status 1. So does a mutant whose old text is not found any more: it
tests nothing. Edits that change nothing observable have no place in the list.

    python scripts/mutants.py [--only WORDS] [--jobs 2] [--list]
    python scripts/mutants.py --device [--only WORDS] [--jobs 16] [--build]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILE = ("-std=c++20", "-O0", "-ffp-contract=off", "-pthread")
TSAN = ("-fsanitize=thread", "-fno-builtin")  # inlined memcpy would not be seen
STANDARD = "".join(f"#include <{name}>\n" for name in ("algorithm", "deque", "functional", "map", "memory", "thread"))
RUN_S = 120.0  # far more than any test needs: one that runs longer hangs, and is noticed, too

PROTOCOL_ALONE = """#include "purlin/atom/model.hpp"
#include "purlin/snac.hpp"
{extern}template void purlin::snac::run<purlin::model::Model>(purlin::model::Model&, const purlin::Call&);
"""

SNAC = "snac.hpp"
PLAN = "../plan.cpp"
ENTRY, RING, STAGED, PACKETS, DIRECT, DIRECT_SUMS = (
    f"snac/{name}.hpp" for name in ("entry", "ring", "staged", "packets", "direct", "direct_sums")
)
CPU = "atom/cpu.hpp"
CHANNEL = "channel.hpp"
MOVES = "moves.hpp"

MODEL = ("model", "--seeds", "6000", "--failures", "1")
THREADS = ("tsan", "--seeds", "1500", "--failures", "1")
UNIT = ("unit",)
ENDPOINT = ("endpoint", "--calls", "3000", "--failures", "1")


@dataclass(frozen=True)
class Mutant:
    """`edits` are pairs (old, new) in csrc/purlin/`file`; every old text stands there exactly once, in any layout.

    `caught_by` is a program and its arguments.
    """

    name: str
    file: str
    caught_by: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]
    # of those in device_mutants.py
    kernels: tuple[str, ...] = ()  # of csrc/cuda, to be compiled with it
    late: str = ""  # before what one warp dawdles in every call (tests/cpp/late.cuh); empty: anywhere, at times
    may_survive: bool = False  # on one GPU
    in_ptx: bool = False  # scripts/ptx_lint.py must find it


def mutant(name: str, file: str, caught_by: tuple[str, ...], *edits: tuple[str, str]) -> Mutant:
    return Mutant(name, file, caught_by, edits)


def drop(old: str) -> tuple[str, str]:
    return old, ""


def swap(first: str, second: str) -> tuple[str, str]:
    """Two texts that follow each other, in the other order."""
    return first + second, second + first


# fmt: off
RING_COPY = """    for (int p = 0; p < c.peers(); ++p) {
      Range range = cut(route, p, step);
      if (!range.empty()) a.copy(in_slot(slot_out(p, step), range.lo), in_tensors<A::flat>(route(p), tensors), range);
    }
"""
RING_NOTIFY = """    int peers = c.peers();
    a.notify(c.onto_sent ? 2 * peers : peers, [&](int k) {
      int p = k < peers ? k : k - peers;
      if (cut(route, p, step).empty()) return Mark{};
      return k < peers ? ready_out(p, step) : Ring{a, c, Use::home}.home_out(p, step);
    });
"""
COPY_OUT = """    for (int p = 0; p < c.peers(); ++p) {
      Range range = ring().cut(Receiving{c}, p, i);
      if (!range.empty()) a.copy(in_tensors<A::flat>(c.pair[p].receive, c.output), in_slot(ring().slot_in(p, i), range.lo), range);
    }
"""
COPY_FREE = "    ring().let_go(i, Receiving{c});\n"
SUM = "    add(1, [&](int) { return in_tensors<A::flat>(c.own_to, c.output); }, i, range);\n"
SUM_FREE = "    ring().let_go(i, Own{c});\n"
SPREAD = "    reduce.add(c.ranks, to, i, range);\n"
SPREAD_TOLD = """    int peers = c.peers();
    a.notify(2 * peers, [&](int k) { return k < peers ? reduce.ring().freed_out(k, i) : sums().ready_out(k - peers, i); });
"""
DIRECT_COPY = "    for (int p = 0; ok && p < c.peers(); ++p) push(p);\n"
DIRECT_NOTIFY = "    if (ok) a.notify(c.peers(), [&](int p) { return at().live(c.pair[p].send) ? at().ready_out(p) : Mark{}; });\n"
LENT_ADD = "    add(range);\n"
LENT_NOTIFY = "    a.notify(c.peers(), [&](int p) { return at().ready_out(p); });\n"
LENT_COPY = "for (int p = 0; c.kind == Kind::all_reduce && p < c.peers(); ++p) contribute(p);\n"
LENT_LEND = "a.lend(c.peers(), [&](int p) { return at().live(slice(p)) ? at().offer(p, 0, tensor) : GrantMark{}; });\n"
LENT_READY = "a.expect(c.peers(), ready, {Where::What::message, Use::direct, 0});"

PROTOCOL = (
    mutant("ring: no wait for credit", RING, MODEL, drop("if (!credited(step, route)) return false;")),
    mutant("ring: one credit too many", RING, MODEL, ("credit_for(sent(p, step), c.geo", "credit_for(sent(p, step) - 1, c.geo")),
    mutant("ring: notify before the copy", RING, MODEL, swap(RING_COPY, RING_NOTIFY)),
    mutant("ring: no notify", RING, MODEL, drop(RING_NOTIFY)),
    mutant("ring: no wait for the message", RING, MODEL, (".empty() ? Mark{} : ready_in(p, step)", ".empty() ? Mark{} : Mark{}")),
    mutant("ring: slots never freed", RING, MODEL, (".empty() ? Mark{} : freed_out(p, step)", ".empty() ? Mark{} : Mark{}")),
    mutant("ring: one message too many is freed", RING, MODEL, ("a.team(), use), taken(p, step) + 1}", "a.team(), use), taken(p, step) + 2}")),
    mutant("ring: sent not kept", RING, MODEL, ("sent(p, route(p).messages(a.team(), a.teams()))", "sent(p, 0)")),
    mutant("ring: taken not kept", RING, MODEL, ("taken(p, route(p).messages(a.team(), a.teams()))", "taken(p, 0)")),
    mutant("ring: the other direction's signature", RING, MODEL,
           ("tag(taken(p, step), c.pair[p].receive_signature)", "tag(taken(p, step), c.pair[p].send_signature)")),
    mutant("copy: freed before it is read", STAGED, MODEL, swap(COPY_OUT, COPY_FREE)),
    mutant("copy: the source goes on after a failed wait", STAGED, MODEL, ("if (ok) ok = ring().send(", "ring().send(")),
    mutant("copy: the reader goes on after a failed wait", STAGED, MODEL,
           ("if (!(ok = ring().arrived(i, Receiving{c}))) return;", "ring().arrived(i, Receiving{c});")),
    mutant("copy: as many messages behind as slots", SNAC, MODEL, ("a.both(c.lag, consume", "a.both(c.geometry.slots, consume")),
    mutant("copy: as many messages behind as slots, beside its own", SNAC, MODEL,
           (".three(c.lag, CopyOwn<A>", ".three(c.geometry.slots, CopyOwn<A>")),
    mutant("copy: two roles copy what stays at home", STAGED, MODEL, ("if (at_home == AtHome::consumer) copy_own(", "copy_own(")),
    mutant("copy: nobody copies what stays at home", STAGED, MODEL, ("step(int i) { copy_own(a, c, i); }", "step(int) {}")),
    mutant("reduce: freed before it is read", STAGED, MODEL, swap(SUM, SUM_FREE)),
    mutant("reduce: as many messages behind as slots", SNAC, MODEL, (".both(c.lag, Reduce<A>", ".both(c.geometry.slots, Reduce<A>")),
    mutant("one exchange in place: no wait for what is sent", STAGED, MODEL, (" && is_staged(i))", ")")),
    mutant("one exchange in place: a wait for one message less", RING, MODEL,
           ("mine().home(p, a.team()), taken(p, step) + 1}", "mine().home(p, a.team()), taken(p, step)}")),
    mutant("one exchange in place: who adds is told nothing", RING, MODEL, ("Ring{a, c, Use::home}.home_out(p, step)", "Mark{}")),
    mutant("one exchange in place: half of the words are told", RING, MODEL, ("c.onto_sent ? 2 * peers : peers", "peers")),
    mutant("one exchange in place: sent not kept", STAGED, MODEL,
           drop("if (c.onto_sent) Ring<A>{a, c, Use::home}.count_sent(Sending{c});")),
    mutant("one exchange in place: taken not kept", STAGED, MODEL, drop("if (c.onto_sent) home().count_taken(Own{c});")),
    mutant("one exchange in place: a peer's post counts against it", "atom/model_acts.hpp", MODEL, drop("where.what != Where::What::home && ")),
    mutant("all-reduce: one ring for both halves", STAGED, MODEL, ("sums{a, c, Use::gather, ", "sums{a, c, Use::ring, "),
           ("sums() const { return {a, c, Use::gather}; }", "sums() const { return {a, c, Use::ring}; }")),
    mutant("all-reduce: no wait for the contributions", STAGED, MODEL, ("ok = reduce.ring().arrived(i, Own{c}) && sums()", "ok = sums()")),
    mutant("all-reduce: no wait for the credit of the sum", STAGED, MODEL, drop("&& sums().credited(i, OwnSum{c})")),
    mutant("all-reduce: told before it is summed", STAGED, MODEL, swap(SPREAD, SPREAD_TOLD)),
    mutant("all-reduce: a place is left out", STAGED, MODEL, ("reduce.add(c.ranks, to", "reduce.add(c.ranks - 1, to")),
    mutant("all-reduce: contributions are not let go of", STAGED, MODEL, ("k < peers ? reduce.ring().freed_out(k, i)", "k < peers ? Mark{}")),
    mutant("all-reduce: sums are not told", STAGED, MODEL, (": sums().ready_out(k - peers, i)", ": Mark{}")),
    mutant("all-reduce: half of the words are told", STAGED, MODEL, ("a.notify(2 * peers,", "a.notify(peers,")),
    mutant("all-reduce: each ring is told the other's word", STAGED, MODEL,
           ("reduce.ring().freed_out(k, i) : sums().ready_out(k - peers, i)", "sums().freed_out(k, i) : reduce.ring().ready_out(k - peers, i)")),
    mutant("all-reduce: as many messages behind as slots", SNAC, MODEL,
           (".three(c.lag, Gather<C>", ".three(c.geometry.slots, Gather<C>")),
    mutant("packet: no wait for credit", PACKETS, MODEL,
           ("return Mark{all().mine().freed(p, a.team(), Use::packet), credit_for(all().sent(p), packet_slots)};", "return Mark{};")),
    mutant("packet: one credit too many", PACKETS, MODEL, ("credit_for(all().sent(p), packet", "credit_for(all().sent(p) - 1, packet")),
    mutant("packet: credit before the packet is taken", PACKETS, MODEL, ("Use::packet), all().taken(p)}", "Use::packet), all().taken(p) + 1}")),
    mutant("packet: credit never paid", PACKETS, MODEL,
           ("return Mark{all().theirs(p).freed(c.as_seen_by(p), a.team(), Use::packet), all().taken(p)};", "return Mark{};")),
    mutant("packet: the roles do not meet", PACKETS, MODEL, ("copy_own(a, c, 0); if (c.kind != Kind::copy) a.meet();", "copy_own(a, c, 0);"),
           ("a.meet(); if (!all()", "if (!all()")),
    mutant("packet: sent not kept", PACKETS, MODEL, ("all().sent(p) + !all().cut(c.pair[p].send).empty()}", "all().sent(p)}")),
    mutant("packet: taken not kept", PACKETS, MODEL, ("all().taken(p) + !all().cut(due(p)).empty()}", "all().taken(p)}")),
    mutant("direct: no wait for the grant", DIRECT, MODEL, ("a.expect(c.grants * c.peers(), grant", "a.expect(0, grant")),
    mutant("direct: only the first grant is waited for", DIRECT, MODEL, ("a.expect(c.grants * c.peers(), grant", "a.expect(c.peers(), grant")),
    mutant("direct: what peers write is read ahead", DIRECT, MODEL,
           ("if (Range range = cut(p); !range.empty()) a.ahead(source(p), range);",
            "if (Range range = c.pair[p].receive.range(0, a.team(), a.teams()); !range.empty()) "
            "a.ahead(in_tensors<A::flat>(c.pair[p].receive, c.output), range);")),
    mutant("direct: no grant", DIRECT, MODEL, ("? at().offer(p, k, c.output[k]) : GrantMark{}", "? GrantMark{} : GrantMark{}")),
    mutant("direct: notify before the copy", DIRECT, MODEL, swap(DIRECT_COPY, DIRECT_NOTIFY)),
    mutant("direct: no notify", DIRECT, MODEL, drop(DIRECT_NOTIFY)),
    mutant("direct: no wait for the message", DIRECT, MODEL, drop("a.expect(c.peers(), ready, {Where::What::message, Use::direct, 0});")),
    mutant("direct: sent not kept", DIRECT, MODEL, ("at().sent(p) + at().live(c.pair[p].send)}", "at().sent(p)}")),
    mutant("direct: taken not kept", DIRECT, MODEL, ("taken(p) + live(route)}", "taken(p)}")),
    mutant("direct sums: no wait for what is lent", DIRECT_SUMS, MODEL, ("range.empty() || !lent()) return;", "range.empty()) return;")),
    mutant("direct sums: adds after a failed wait", DIRECT_SUMS, MODEL, ("range.empty() || !lent()) return;", "range.empty()) return; lent();")),
    mutant("direct sums: nothing is lent", DIRECT_SUMS, MODEL, ("? at().offer(p, 0, tensor) : GrantMark{}", "? GrantMark{} : GrantMark{}")),
    mutant("direct sums: the other tensor is lent", DIRECT_SUMS, MODEL, ("c.kind == Kind::reduce ? c.input[0] : c.output[0]", "c.output[0]")),
    mutant("direct sums: lent before the contributions lie there", DIRECT_SUMS, MODEL, (LENT_COPY, ""), (LENT_LEND, LENT_LEND + LENT_COPY)),
    mutant("direct sums: lent with the other direction's number", DIRECT_SUMS, MODEL,
           ("at().granted(p, 0)", "Mark{&at().grant_in(p)->tag, at().ready_in(p).value}")),
    mutant("direct sums: told before it is summed", DIRECT_SUMS, MODEL, swap(LENT_ADD, LENT_NOTIFY)),
    mutant("direct sums: not told", DIRECT_SUMS, MODEL, drop(LENT_NOTIFY)),
    mutant("direct sums: a place is left out", DIRECT_SUMS, MODEL, ("? 1 : c.ranks;", "? 1 : c.ranks - 1;")),
    mutant("direct sums: sums of a reduction go to all", DIRECT_SUMS, MODEL, ("c.kind == Kind::reduce ? 1 : c.ranks", "c.ranks")),
    mutant("direct sums: no wait for the sums of others", DIRECT_SUMS, MODEL, drop(LENT_READY)),
    mutant("direct sums: everyone adds first", DIRECT_SUMS, MODEL, ("if (i == 0 || range", "if (i != 0 || range")),
    mutant("direct sums: sent not kept", DIRECT_SUMS, MODEL, ("at().sent(p) + at().live(c.own_from)}", "at().sent(p)}")),
    mutant("direct sums: taken not kept", DIRECT_SUMS, MODEL, ("return at().taken_after(p, slice(p));", "return Mark{};")),
    mutant("post: never told", ENTRY, MODEL, ("if (a.team() != 0) return;", "if (a.team() >= 0) return;")),
    mutant("post: a call too early", ENTRY, MODEL, ("tag(c.progress->calls, c.sig", "tag(c.progress->calls + 1, c.sig")),
)

ADDRESSES = (
    mutant("credit: first messages wait for ever", CHANNEL, MODEL, ("message + 1 > all ? message + 1 - all : 0", "message + 1 - all")),
    mutant("tag: the number's low bit lost", CHANNEL, UNIT, ("return tag >> signature_bits;", "return tag >> signature_bits >> 1;")),
    mutant("slots: both rings in one place", CHANNEL, UNIT, ("* 2 + (use == Use::gather)) * g.slots", "* 2) * g.slots")),
    mutant("words: teams share them", CHANNEL, UNIT, ("return peer * g.teams + team;", "return peer * g.teams;")),
    mutant("words: uses share freed", CHANNEL, UNIT, ("- line + static_cast<int>(use) * 8)", "- line)")),
    mutant("words: grants in the line of freed", CHANNEL, UNIT, ("g.pair_words - 2 * line);", "g.pair_words - line);")),
    mutant("windows: one for all messages", CHANNEL, UNIT, ("static_cast<int>(message % packet_slots)", "0")),
    mutant("peers: seen from the wrong side", "spec.hpp", UNIT, ("return ranks - 2 - peer;", "return peer;")),
    mutant("wire: the last chunk too long", MOVES, UNIT, ("smaller(from + chunk, lo + bytes)}", "from + chunk}")),
    mutant("wire: no gaps between items", MOVES, UNIT, drop("if (wire < item.at) return gap(item.at - wire);")),
    mutant("wire: a carry is lost", MOVES, UNIT, ("== box.extent[d]; --d) index_[d] = 0;", "== box.extent[d]; --d);")),
    mutant("flat: where the tensor begins is not where the bytes do", MOVES, UNIT,
           ("tensors[route.tensor] + route.offset, nullptr", "tensors[route.tensor], nullptr")),
    mutant("flat: the first grant serves all", MOVES, UNIT, ("grants[route.tensor].place + route.offset", "grants[0].place + route.offset")),
    mutant("divider: rounded down", MOVES, UNIT, ("(32 + shift)) + divisor - 1) / divisor)", "(32 + shift))) / divisor)")),
    mutant("slots: a power of two is none", CHANNEL, UNIT, ("(slots & (slots - 1)) == 0", "(slots & (slots - 1)) != 0")),
    mutant("half: ties away from even", "halves.hpp", UNIT, ("0x0fffu + (rest >> 13 & 1u)) >> 13", "0x1000u) >> 13")),
    mutant("bfloat16: ties away from even", "halves.hpp", UNIT, ("0x7fffu + (bits >> 16 & 1u)) >> 16", "0x8000u) >> 16")),
    mutant("max: NaN is lost", "numeric.hpp", UNIT, ("return b > a || b != b ?", "return b > a ?")),
)

PLANS = (
    mutant("plan: a flat route forgets where its tensor lies", PLAN, ENDPOINT,
           ("route.offset = item.box.offset - item.at;", "route.offset = -item.at;")),
    mutant("plan: a flat route forgets its tensor", PLAN, ENDPOINT, drop("route.tensor = item.box.tensor;")),
    mutant("plan: a box with strides is flat", PLAN, ENDPOINT, ("route.count == 1 && items_.back().box.dims == 0", "route.count == 1")),
    mutant("plan: several stretches are flat", PLAN, ENDPOINT, ("route.count == 1 && items", "route.count >= 1 && items")),
    mutant("plan: a chunk is cut through an element", PLAN, ENDPOINT,
           ("round_up(larger(ceil_div(route.bytes, call_.teams), unit), unit)", "larger(ceil_div(route.bytes, call_.teams), unit)")),
    mutant("plan: chunks longer than slots", PLAN, ENDPOINT, ("? smaller<i64>(even, geometry.slot_bytes) : even", "? even : even")),
    mutant("plan: steps of my own messages alone", PLAN, ENDPOINT,
           ("larger(call_.pair[p].send.messages(0, call_.teams), call_.pair[p].receive.messages(0, call_.teams))",
            "call_.pair[p].send.messages(0, call_.teams)")),
)

HANDS = (
    mutant("notify: no release", CPU, THREADS, ("m.value, std::memory_order_release", "m.value, std::memory_order_relaxed")),
    mutant("wait: no acquire", CPU, THREADS,
           ("load(std::memory_order_acquire) >= m.value", "load(std::memory_order_relaxed) >= m.value")),
    mutant("expect, take: no acquire", CPU, THREADS,
           ("number_of(shared(word).load(std::memory_order_acquire))", "number_of(shared(word).load(std::memory_order_relaxed))")),
    mutant("grant: no release", CPU, THREADS, ("m.value.tag, std::memory_order_release", "m.value.tag, std::memory_order_relaxed")),
    mutant("put: no wait for credit", CPU, THREADS, drop("if (Arrival got = wait(n, credit, where); got != Arrival::yes) return got;")),
    mutant("put: no release", CPU, THREADS, ("store(lines.tag, std::memory_order_release)", "store(lines.tag, std::memory_order_relaxed)")),
    mutant("put: the tag before the payload", CPU, THREADS,
           swap("gather(line, read, smaller(payload_bytes, out.range.hi - lo));",
                "shared(reinterpret_cast<Word*>(line + payload_bytes)).store(lines.tag, std::memory_order_release);")),
    mutant("meet: nobody waits", CPU, THREADS, drop("while (met_.load() < 2) sched_yield();")),
    mutant("meet: no release, no acquire", CPU, THREADS, ("met_.fetch_add(1)", "met_.fetch_add(1, std::memory_order_relaxed)"),
           ("met_.load() < 2", "met_.load(std::memory_order_relaxed) < 2")),
    mutant("both: everything is staged first", CPU, THREADS,
           ("for (int i = 0; i < last; ++i) {", "for (int i = 0; i < stage.steps(); ++i) stage.step(i); for (int i = 0; i < last; ++i) {"),
           drop("if (i < stage.steps()) stage.step(i);")),
    mutant("both: the roles share their patience", CPU, THREADS, ("patience_[roles == Roles::side_by_side ? role_ : 0]", "patience_[0]")),
    mutant("leave: teams count without an exchange", CPU, THREADS, ("shared(&call_.progress->left).fetch_add(1) + 1", "++call_.progress->left")),
    mutant("leave: calls not counted", CPU, THREADS, drop("++call_.progress->calls;")),
    mutant("expect: signatures not compared", CPU, UNIT, ("shared(word).load(std::memory_order_relaxed) != tag", "false")),
    mutant("expect: a later message will do", CPU, UNIT,
           ("(std::memory_order_acquire)) == number_of(tag)", "(std::memory_order_acquire)) >= number_of(tag)")),
    mutant("wait: more than enough is asked", CPU, UNIT, ("(std::memory_order_acquire) >= m.value", "(std::memory_order_acquire) > m.value")),
    mutant("grant: may lie below the heap", CPU, UNIT, ("return place >= g.heap_at && place <=", "return place <=")),
    mutant("grant: may end behind the heap", CPU, UNIT, drop("&& place <= g.arena_bytes - call_.pair[peer].reach")),
    mutant("wait: poison not seen", CPU, UNIT, drop("if (poisoned()) return failed_ = true, Arrival::never;")),
    mutant("enter: poison not seen", CPU, UNIT, ("enter() const { return !poisoned(); }", "enter() const { return true; }")),
    mutant("fail: peers not told", CPU, UNIT, ("for (int r = 0; r < call_.ranks; ++r) poison(call_.geometry, call_.arena[r], what);",
                                               "poison(call_.geometry, call_.own_arena(), what);")),
    mutant("poison: the last one stays", CPU, UNIT,
           ("compare_exchange_strong(none, encode(what), std::memory_order_acq_rel)", "store(encode(what) + none)")),
    mutant("wait: no deadline", CPU, UNIT, ("patience.since_first() > host_.timeout", "false")),
    mutant("wait: posts not looked at", CPU, UNIT, ("why != Fault::none && !come()", "why != why")),
    mutant("wait: no second look after the post", CPU, UNIT, ("why != Fault::none && !come()", "why != Fault::none")),
    mutant("wait at home: a peer's post counts against it", CPU, UNIT, drop("where.what != Where::What::home && ")),
    mutant("wait: a farewell not seen", CPU, UNIT, drop("if (post == farewell) return Fault::left;")),
    mutant("wait: no interrupts", CPU, UNIT, ("if (host_.interrupted && host_.interrupted())", "if (false)")),
    mutant("post: a peer that is ahead is not noticed", "fault.hpp", UNIT, ("return ahead > 0 || (ahead == 0 &&", "return (ahead == 0 &&")),
    mutant("post: another signature is not noticed", "fault.hpp", UNIT,
           ("return ahead > 0 || (ahead == 0 && signature_of(post) != (signature & signature_mask));", "return ahead > 0;")),
    mutant("post: a peer that is behind is taken for ahead", "fault.hpp", UNIT, ("return ahead > 0 ||", "return ahead != 0 ||")),
)
# fmt: on

MUTANTS = PROTOCOL + ADDRESSES + PLANS + HANDS


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    how: str  # empty: it survived
    seeds: str
    seconds: float


def pattern(old: str) -> re.Pattern[str]:
    """The same tokens, laid out in any way."""
    return re.compile(r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", old))))


def stale(mutants: Sequence[Mutant]) -> Iterator[str]:
    for m in mutants:
        text = (ROOT / "csrc/purlin" / m.file).read_text()
        for old, _ in m.edits:
            found = len(pattern(old).findall(text))
            if found != 1:
                yield f"{m.name}: in {m.file} its old text stands {found} times: {old.strip().splitlines()[0]}"


def is_protocol(m: Mutant) -> bool:
    return m.file.startswith("snac")


def plant(m: Mutant, folder: Path) -> None:
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("*.cuh", "*.cu"))
    path = folder / "csrc/purlin" / m.file
    text = path.read_text()
    for old, new in m.edits:
        text = pattern(old).sub(lambda _, new=new: new, text)  # type: ignore[misc]
    path.write_text(text)


def compiler(program: str) -> list[str]:
    return [os.environ.get("CXX", "g++"), *COMPILE, *(TSAN if program == "tsan" else ())]


def of_csrc(folder: Path, shared: Path, program: str) -> list[str]:
    """The compiler for what stands on the csrc of `folder`; `shared` has the standard library for it, compiled once."""
    return [*compiler(program), "-I", str(folder / "csrc"), "-include", str(standard(shared, program))]


def standard(shared: Path, program: str) -> Path:
    return shared / f"standard_{'tsan' if program == 'tsan' else 'plain'}.hpp"


def run_quietly(command: Sequence[str]) -> str:
    """The compiler's complaint; empty when all is well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def compile_shared(folder: Path, chosen: Sequence[Mutant]) -> str:
    """What many mutants are compiled with, once: the standard library, and the model test without the protocol."""
    for header, program in {standard(folder, m.caught_by[0]): m.caught_by[0] for m in chosen}.items():
        header.write_text(STANDARD)
        if complaint := run_quietly([*compiler(program), "-x", "c++-header", str(header), "-o", f"{header}.gch"]):
            return complaint
    if not any(map(is_protocol, chosen)):
        return ""
    (folder / "declared.hpp").write_text(PROTOCOL_ALONE.format(extern="extern "))
    command = [*of_csrc(ROOT, folder, "model"), "-include", str(folder / "declared.hpp")]
    return run_quietly([*command, "-c", str(ROOT / "tests/cpp/model.cpp"), "-o", str(folder / "rest.o")])


def compile_test(m: Mutant, folder: Path, shared: Path) -> str:
    program = m.caught_by[0]
    sources = [ROOT / "tests/cpp" / f"{program}.cpp"]
    if is_protocol(m) and program == "model":
        (folder / "protocol.cpp").write_text(PROTOCOL_ALONE.format(extern=""))
        sources = [folder / "protocol.cpp", shared / "rest.o"]
    return run_quietly([*of_csrc(folder, shared, program), *map(str, sources), "-o", str(folder / program)])


def run_test(caught_by: tuple[str, ...], folder: Path) -> tuple[str, str]:
    """How it failed (empty: it did not), and after how many seeds."""
    command = [str(folder / caught_by[0]), *caught_by[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        return f"still running after {RUN_S:.0f} s", ""
    if done.returncode == 0:
        return "", ""
    if done.stdout.startswith("usage:"):
        raise RuntimeError(f"{shlex.join(caught_by)} is not understood: {done.stdout}")
    failure = re.search(r"^seed (\d+): (.+)$", done.stdout, re.MULTILINE)
    if failure:
        return failure[2], str(int(failure[1]) + 1)
    law = re.search(r"^FAILED: (.+)$|^  (\S.*?) +\d+ right, .*FAILED$", done.stdout, re.MULTILINE)
    return (law[1] or law[2] if law else f"exit status {done.returncode}"), ""


def judge(m: Mutant, shared: Path) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        plant(m, folder)
        complaint = compile_test(m, folder, shared)
        if complaint:
            sys.exit(f"mutants: `{m.name}` does not compile:\n{complaint}")
        how, seeds = run_test(m.caught_by, folder)
    return Verdict(m, how, seeds, time.monotonic() - began)


def show(v: Verdict, width: int) -> str:
    how = v.how[:70] if v.how else "SURVIVES"
    return f"{v.mutant.name:<{width}}  {v.mutant.file:<16}  {v.mutant.caught_by[0]:<5}  {v.seeds:>5}  {v.seconds:5.1f} s  {how}"


def verdicts(chosen: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(jobs) as pool:
        if complaint := compile_shared(Path(name), chosen):
            sys.exit(f"mutants: what they share does not compile:\n{complaint}")
        for done in as_completed([pool.submit(judge, m, Path(name)) for m in chosen]):
            yield done.result()


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Remove each guard of the protocol in turn and show which test notices."
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="mutants whose name or file holds these words")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default 2)")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--device", action="store_true", help="mutants of the kernels instead: needs nvcc and a GPU")
    parser.add_argument("--build", action="store_true", help="with --device: compile them and stop; needs no GPU")
    args = parser.parse_args()
    if args.device:
        import device_mutants  # it stands on this module

        return device_mutants.main(args.only, args.jobs, list_only=args.list, build_only=args.build)
    chosen = [m for m in MUTANTS if args.only in m.name or args.only in m.file]
    if args.list:
        print("\n".join(f"{m.name}  ({m.file}, {m.caught_by[0]})" for m in chosen))
        return 0
    old = list(stale(chosen))
    if old:
        print("mutants: these test nothing any more:\n  " + "\n  ".join(old))
        return 1
    began, survivors = time.monotonic(), 0
    width = max(len(m.name) for m in chosen)
    print(f"{'mutant':<{width}}  {'file':<16}  test   seeds     time  how it was noticed")
    for k, verdict in enumerate(verdicts(chosen, args.jobs), 1):
        survivors += not verdict.how
        print(show(verdict, width), flush=True)
        progress(f"{k} of {len(chosen)}, {time.monotonic() - began:.0f} s")
    progress("")
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants noticed in {time.monotonic() - began:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
