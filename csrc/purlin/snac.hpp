// Stage, Notify, And Consume: the one protocol under every collective. It knows no hardware; an Atom moves the bytes.
//
//   source:  wait until `freed` says the slot is free  ->  STAGE the chunk into it  ->  NOTIFY: store the slot's tag
//   reader:  wait until the slot's tag is this message's  ->  AND CONSUME: copy or reduce to the output  ->  say that it is free
//
// A rank reads only its own memory. It writes its own, and at a peer only slots that are free, words of which it is the one writer, and an output granted
// for this very call. In step i a team stages message i to every reader that still has bytes, then consumes message i - lag from every source that still
// has bytes: every wait refers to an earlier (step, phase), so no cycle can form. csrc/README.md has the proofs.
#pragma once
#include "atom/concept.hpp"

namespace purlin {
namespace snac {

// ---- one message a peer on a ring -------------------------------------------------------------------------------------------------------------------
// `route(p)` is the wire that a peer's messages cut; message `step` of this call is number base + step of the channel.

template <class A>
struct Ring {
  A& a;
  const Call& c;
  Use use;

  PURLIN_FN Word sent(int p, int step) const { return c.count(p, a.team()).sent[at()] + step; }
  PURLIN_FN Word taken(int p, int step) const { return c.count(p, a.team()).taken[at()] + step; }
  PURLIN_FN Inbox mine() const { return {c.geometry, c.own_arena()}; }
  PURLIN_FN Inbox theirs(int p) const { return {c.geometry, c.peer_arena(p)}; }
  PURLIN_FN int at() const { return static_cast<int>(use); }

  PURLIN_FN Mark credit(int p, int step) const {  // at my side: the slot of this message has been let go of
    return {mine().freed(p, a.team(), use), credit_for(sent(p, step), c.geometry.slots)};
  }
  PURLIN_FN char* slot_out(int p, int step) const {
    return theirs(p).slot(c.as_seen_by(p), a.team(), use, sent(p, step));
  }
  PURLIN_FN Mark ready_out(int p, int step) const {
    return {theirs(p).ready(c.as_seen_by(p), a.team(), use, sent(p, step)),
            tag(sent(p, step), c.pair[p].send_signature)};
  }
  PURLIN_FN char* slot_in(int p, int step) const { return mine().slot(p, a.team(), use, taken(p, step)); }
  PURLIN_FN Mark ready_in(int p, int step) const {
    return {mine().ready(p, a.team(), use, taken(p, step)), tag(taken(p, step), c.pair[p].receive_signature)};
  }
  PURLIN_FN Mark freed_out(int p, int step) const {
    return {theirs(p).freed(c.as_seen_by(p), a.team(), use), taken(p, step) + 1};
  }

  template <class R>
  PURLIN_FN Range cut(R route, int p, int step) const {
    return route(p).range(step, a.team(), a.teams());
  }

  template <class R>
  PURLIN_FN bool send(int step, R route, char* const* tensors) {
    auto live = [&](int p) { return !cut(route, p, step).empty(); };
    Where where{Where::What::credit, use, step};
    if (a.wait(c.peers(), [&](int p) { return live(p) ? credit(p, step) : Mark{}; }, where) != Arrival::yes)
      return false;
    for (int p = 0; p < c.peers(); ++p) {
      Range range = cut(route, p, step);
      if (!range.empty()) a.copy(in_slot(slot_out(p, step), range.lo), in_tensors(route(p), tensors), range);
    }
    a.notify(c.peers(), [&](int p) { return live(p) ? ready_out(p, step) : Mark{}; });
    return true;
  }
  template <class R>
  PURLIN_FN bool arrived(int step, R route) {
    Where where{Where::What::message, use, step};
    return a.expect(
               c.peers(), [&](int p) { return cut(route, p, step).empty() ? Mark{} : ready_in(p, step); }, where) ==
           Arrival::yes;
  }
  template <class R>
  PURLIN_FN void let_go(int step, R route) {
    a.notify(c.peers(), [&](int p) { return cut(route, p, step).empty() ? Mark{} : freed_out(p, step); });
  }
  template <class R>
  PURLIN_FN void count_sent(R route) {
    a.keep(c.peers(), [&](int p) {
      return Mark{&c.count(p, a.team()).sent[at()], sent(p, route(p).messages(a.team(), a.teams()))};
    });
  }
  template <class R>
  PURLIN_FN void count_taken(R route) {
    a.keep(c.peers(), [&](int p) {
      return Mark{&c.count(p, a.team()).taken[at()], taken(p, route(p).messages(a.team(), a.teams()))};
    });
  }
};

struct Sending {
  const Call& c;
  PURLIN_FN const Route& operator()(int p) const { return c.pair[p].send; }
};
struct Receiving {
  const Call& c;
  PURLIN_FN const Route& operator()(int p) const { return c.pair[p].receive; }
};
struct Own {  // my part, whoever the peer: what I reduce
  const Call& c;
  PURLIN_FN const Route& operator()(int) const { return c.own_from; }
};
struct OwnSum {  // where its sum lies, to be sent to every peer
  const Call& c;
  PURLIN_FN const Route& operator()(int) const { return c.own_to; }
};

template <class A>
PURLIN_FN void copy_own(A& a, const Call& c, int step) {
  Range range = c.own_from.range(step, a.team(), a.teams());
  if (c.kind == Kind::copy && !range.empty())
    a.copy(in_tensors(c.own_to, c.output), in_tensors(c.own_from, c.input), range);
}

// What every call says on entry, by the reader: I am in call n of this signature.
template <class A>
PURLIN_FN void announce(A& a, const Call& c) {
  if (a.team() != 0) return;
  a.tell(c.peers(), [&](int p) {
    return Mark{Inbox{c.geometry, c.peer_arena(p)}.post(c.as_seen_by(p)), tag(c.progress->calls, c.signature)};
  });
}

// ---- staged ------------------------------------------------------------------------------------------------------------------------------------------

template <class A>
struct Stage {
  A& a;
  const Call& c;
  bool ok = true;

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) {
    if (ok) ok = ring().send(i, Sending{c}, c.input);
    if (ok) copy_own(a, c, i);
  }
  PURLIN_FN void close() { ring().count_sent(Sending{c}); }
  PURLIN_FN Ring<A> ring() const { return {a, c, Use::ring}; }
};

template <class A>
struct Consume {
  A& a;
  const Call& c;
  Use use = Use::ring;
  bool ok = true;

  PURLIN_FN void open() { announce(a, c); }
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) {
    if (!ok || !(ok = ring().arrived(i, Receiving{c}))) return;
    for (int p = 0; p < c.peers(); ++p) {
      Range range = ring().cut(Receiving{c}, p, i);
      if (!range.empty())
        a.copy(in_tensors(c.pair[p].receive, c.output), in_slot(ring().slot_in(p, i), range.lo), range);
    }
    ring().let_go(i, Receiving{c});
  }
  PURLIN_FN void close() { ring().count_taken(Receiving{c}); }
  PURLIN_FN Ring<A> ring() const { return {a, c, use}; }
};

template <class A>
struct Reduce {
  A& a;
  const Call& c;
  bool ok = true;

  PURLIN_FN void open() { announce(a, c); }
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) {
    Range range = c.own_from.range(i, a.team(), a.teams());
    if (range.empty() || !ok || !(ok = ring().arrived(i, Own{c}))) return;
    auto slot = [&](int k) -> const char* { return ring().slot_in(c.peer_of(k), i); };
    a.reduce(in_tensors(c.own_to, c.output), in_tensors(c.own_from, c.input), c.ranks, slot, c.rank, range, c.sum);
    ring().let_go(i, Own{c});
  }
  PURLIN_FN void close() { ring().count_taken(Own{c}); }
  PURLIN_FN Ring<A> ring() const { return {a, c, Use::ring}; }
};

// Step i: reduce chunk i of my slice and send the sum on a second ring; take chunk i - lag of the others' slices. One ring for both would deadlock.
template <class A>
struct ReduceThenGather {
  A& a;
  const Call& c;
  Reduce<A> reduce{a, c};
  Consume<A> gather{a, c, Use::gather};

  PURLIN_FN void open() { announce(a, c); }
  PURLIN_FN int steps() const { return c.steps + c.lag; }
  PURLIN_FN void step(int i) {
    reduce.step(i);
    if (reduce.ok) reduce.ok = Ring<A>{a, c, Use::gather}.send(i, OwnSum{c}, c.output);
    if (!reduce.ok || i < c.lag) return;
    gather.step(i - c.lag);
    reduce.ok = gather.ok;
  }
  PURLIN_FN void close() {
    reduce.close();
    Ring<A>{a, c, Use::gather}.count_sent(OwnSum{c});
    gather.close();
  }
};

// ---- packet: one message a peer, payload and tag in one line; the credit is paid when the reader next enters a call ------------------------------------

template <class A>
struct Packets {
  A& a;
  const Call& c;

  PURLIN_FN Counts& count(int p) const { return c.count(p, a.team()); }
  PURLIN_FN Word& sent(int p) const { return count(p).sent[static_cast<int>(Use::packet)]; }
  PURLIN_FN Word& taken(int p) const { return count(p).taken[static_cast<int>(Use::packet)]; }
  PURLIN_FN Range cut(const Route& route) const { return route.range(0, a.team(), a.teams()); }
  PURLIN_FN Inbox mine() const { return {c.geometry, c.own_arena()}; }
  PURLIN_FN Inbox theirs(int p) const { return {c.geometry, c.peer_arena(p)}; }
  PURLIN_FN Packet in(int p, const Route& route, const Place& to) const {
    if (cut(route).empty()) return {};
    return {mine().window(p, a.team(), taken(p)), tag(taken(p), c.pair[p].receive_signature), to, cut(route)};
  }
  PURLIN_FN Packet out(int p) const {
    const Route& route = c.pair[p].send;
    if (cut(route).empty()) return {};
    char* window = theirs(p).window(c.as_seen_by(p), a.team(), sent(p));
    return {window, tag(sent(p), c.pair[p].send_signature), in_tensors(route, c.input), cut(route)};
  }
};

template <class A>
struct StagePackets {
  A& a;
  const Call& c;
  bool ok = true;

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return 1; }
  PURLIN_FN void step(int) {
    auto credit = [&](int p) {
      if (all().cut(c.pair[p].send).empty()) return Mark{};
      return Mark{all().mine().freed(p, a.team(), Use::packet), credit_for(all().sent(p), packet_slots)};
    };
    ok = a.wait(c.peers(), credit, {Where::What::credit, Use::packet, 0}) == Arrival::yes;
    if (ok) a.put(c.peers(), [&](int p) { return all().out(p); });
    if (ok) copy_own(a, c, 0);
    a.meet();  // an all-reduce onto itself overwrites what was just put
  }
  PURLIN_FN void close() {
    a.keep(c.peers(), [&](int p) { return Mark{&all().sent(p), all().sent(p) + !all().cut(c.pair[p].send).empty()}; });
  }
  PURLIN_FN Packets<A> all() const { return {a, c}; }
};

template <class A>
struct ConsumePackets {
  A& a;
  const Call& c;

  PURLIN_FN void open() {
    announce(a, c);
    a.tell(c.peers(),
           [&](int p) { return Mark{all().theirs(p).freed(c.as_seen_by(p), a.team(), Use::packet), all().taken(p)}; });
  }
  PURLIN_FN int steps() const { return 1; }
  PURLIN_FN void step(int) {
    Where where{Where::What::message, Use::packet, 0};
    a.meet();
    if (c.kind == Kind::copy) {
      a.take(
          c.peers(), [&](int p) { return all().in(p, c.pair[p].receive, in_tensors(c.pair[p].receive, c.output)); },
          where);
    } else if (!all().cut(c.own_from).empty()) {
      Place to = in_tensors(c.own_to, c.output), own = in_tensors(c.own_from, c.input);
      auto packet = [&](int k) {
        return k == c.rank ? Packet{nullptr, 0, own, all().cut(c.own_from)} : all().in(c.peer_of(k), c.own_from, to);
      };
      a.take_reduce(to, own, c.ranks, packet, c.rank, c.sum, where);
    }
  }
  PURLIN_FN void close() {
    auto due = [&](int p) -> const Route& { return c.kind == Kind::copy ? c.pair[p].receive : c.own_from; };
    a.keep(c.peers(), [&](int p) { return Mark{&all().taken(p), all().taken(p) + !all().cut(due(p)).empty()}; });
  }
  PURLIN_FN Packets<A> all() const { return {a, c}; }
};

// ---- direct: the reader grants its outputs on entry, the source writes them -----------------------------------------------------------------------------

template <class A>
struct Direct {
  A& a;
  const Call& c;

  PURLIN_FN Word& sent(int p) const { return c.count(p, a.team()).sent[static_cast<int>(Use::direct)]; }
  PURLIN_FN Word& taken(int p) const { return c.count(p, a.team()).taken[static_cast<int>(Use::direct)]; }
  PURLIN_FN bool live(const Route& route) const { return !route.range(0, a.team(), a.teams()).empty(); }
  PURLIN_FN Inbox mine() const { return {c.geometry, c.own_arena()}; }
  PURLIN_FN Inbox theirs(int p) const { return {c.geometry, c.peer_arena(p)}; }
  PURLIN_FN Grant* grant_in(int p) const { return mine().grants(p, a.team()); }
};

template <class A>
struct StageDirect {
  A& a;
  const Call& c;
  bool ok = true;

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return 1; }
  PURLIN_FN void step(int) {
    copy_own(a, c, 0);
    for (int k = 0; ok && k < c.grants; ++k) ok = granted(k);
    for (int p = 0; ok && p < c.peers(); ++p) push(p);
    if (ok) a.notify(c.peers(), [&](int p) { return at().live(c.pair[p].send) ? ready(p) : Mark{}; });
  }
  PURLIN_FN void close() {
    a.keep(c.peers(), [&](int p) { return Mark{&at().sent(p), at().sent(p) + at().live(c.pair[p].send)}; });
  }
  PURLIN_FN Direct<A> at() const { return {a, c}; }
  PURLIN_FN bool granted(int k) {
    auto grant = [&](int p) {
      if (!at().live(c.pair[p].send)) return Mark{};
      return Mark{&at().grant_in(p)[k].tag, tag(at().sent(p), c.pair[p].send_signature)};
    };
    return a.expect(c.peers(), grant, {Where::What::grant, Use::direct, k}) == Arrival::yes;
  }
  PURLIN_FN void push(int p) {
    const Pair& pair = c.pair[p];
    Range range = pair.send.range(0, a.team(), a.teams());
    if (range.empty()) return;
    a.copy(in_granted(pair.remote, c.peer_arena(p), at().grant_in(p)), in_tensors(pair.send, c.input), range);
  }
  PURLIN_FN Mark ready(int p) const {
    return {at().theirs(p).ready(c.as_seen_by(p), a.team(), Use::direct, 0),
            tag(at().sent(p), c.pair[p].send_signature)};
  }
};

template <class A>
struct ConsumeDirect {
  A& a;
  const Call& c;

  PURLIN_FN void open() {
    announce(a, c);
    for (int k = 0; k < c.grants; ++k)
      a.grant(c.peers(), [&](int p) { return at().live(c.pair[p].receive) ? offer(p, k) : GrantMark{}; });
  }
  PURLIN_FN int steps() const { return 1; }
  PURLIN_FN void step(int) {
    auto ready = [&](int p) {
      if (!at().live(c.pair[p].receive)) return Mark{};
      return Mark{at().mine().ready(p, a.team(), Use::direct, 0), tag(at().taken(p), c.pair[p].receive_signature)};
    };
    a.expect(c.peers(), ready, {Where::What::message, Use::direct, 0});
  }
  PURLIN_FN void close() {
    a.keep(c.peers(), [&](int p) { return Mark{&at().taken(p), at().taken(p) + at().live(c.pair[p].receive)}; });
  }
  PURLIN_FN Direct<A> at() const { return {a, c}; }
  PURLIN_FN GrantMark offer(int p, int k) const {
    Grant* line = at().theirs(p).grants(c.as_seen_by(p), a.team()) + k;
    return {line, {static_cast<Word>(c.output[k] - c.own_arena()), tag(at().taken(p), c.pair[p].receive_signature)}};
  }
};

// ---- a call ----------------------------------------------------------------------------------------------------------------------------------------------

template <Atom A>
PURLIN_FN void packets(A& a, const Call& c) {
  a.both(0, ConsumePackets<A>{a, c}, StagePackets<A>{a, c});
}
template <Atom A>
PURLIN_FN void direct(A& a, const Call& c) {
  a.both(0, ConsumeDirect<A>{a, c}, StageDirect<A>{a, c});
}
template <Atom A>
PURLIN_FN void staged(A& a, const Call& c) {
  if (c.kind == Kind::copy) {
    a.both(c.lag, Consume<A>{a, c}, Stage<A>{a, c});
  } else if (c.kind == Kind::reduce) {
    a.both(c.lag, Reduce<A>{a, c}, Stage<A>{a, c});
  } else {
    a.both(c.lag, ReduceThenGather<A>{a, c}, Stage<A>{a, c});
  }
}

template <Atom A>
PURLIN_FN void run(A& a, const Call& c) {
  if (!a.enter()) return;
  switch (c.regime) {
    case Regime::packet: packets(a, c); break;
    case Regime::direct: direct(a, c); break;
    case Regime::staged: staged(a, c); break;
  }
  a.leave();
}

}  // namespace snac
}  // namespace purlin
