// Staged: copies, reductions and all-reduces through rings, joined or in one exchange. The notify follows the copies, the credit follows the reader.
#pragma once
#include "entry.hpp"
#include "ring.hpp"

namespace purlin::snac {

template <class A>
struct Stage {
  A& a;
  const Call& c;
  bool ok = true;

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) {
    if (ok) ok = ring().send(i, Sending{c}, c.input);
  }
  PURLIN_FN void close() {
    ring().count_sent(Sending{c});
    if (c.onto_sent) Ring<A>{a, c, Use::home}.count_sent(Sending{c});
  }
  PURLIN_FN Ring<A> ring() const { return {a, c, Use::ring}; }
};

enum class AtHome { consumer, apart };  // who copies what stays at home: the role that consumes, or one of its own

// A team of three blocks has one for it. It waits for nobody, and nobody for it: what it reads nobody writes, and what it writes nobody else reads or writes.
// In place that is so because it goes where it lies already: purlin_core/alias.py allows no other form of a copy.
PURLIN_FN constexpr AtHome home_of(int parts) { return parts == 3 ? AtHome::apart : AtHome::consumer; }

template <class A>
struct CopyOwn {
  A& a;
  const Call& c;

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) { copy_own(a, c, i); }
  PURLIN_FN void close() {}
};

template <class A>
struct Consume {
  A& a;
  const Call& c;
  Use use;
  AtHome at_home;
  bool ok = true;

  PURLIN_FN void open() { announce(a, c); }
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) {
    if (!ok) return;
    if (at_home == AtHome::consumer) copy_own(a, c, i);  // while the messages are on their way
    if (!(ok = ring().arrived(i, Receiving{c}))) return;
    for (int p = 0; p < c.peers(); ++p) {
      Range range = ring().cut(Receiving{c}, p, i);
      if (!range.empty())
        a.copy(in_tensors<A::flat>(c.pair[p].receive, c.output), in_slot(ring().slot_in(p, i), range.lo), range);
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
    Range range = mine(i);
    if (range.empty() || !ok || !(ok = ring().arrived(i, Own{c}) && is_staged(i))) return;
    add(1, [&](int) { return in_tensors<A::flat>(c.own_to, c.output); }, i, range);
    ring().let_go(i, Own{c});
  }
  PURLIN_FN void close() {
    ring().count_taken(Own{c});
    if (c.onto_sent) home().count_taken(Own{c});
  }

  PURLIN_FN Ring<A> ring() const { return {a, c, Use::ring}; }
  PURLIN_FN Ring<A> home() const { return {a, c, Use::home}; }
  // Whether what the sum of chunk i overwrites has been staged for all peers.
  PURLIN_FN bool is_staged(int i) const {
    if (!c.onto_sent) return true;
    Where where{Where::What::home, Use::home, i};
    return a.wait(c.peers(), [&](int p) { return home().home_in(p, i); }, where) == Arrival::yes;
  }
  PURLIN_FN Range mine(int i) const { return c.own_from.range(i, a.team(), a.teams()); }
  template <class T>
  PURLIN_FN void add(int places, T to, int i, Range range) {
    auto slot = [&](int k) -> const char* { return ring().slot_in(c.peer_of(k), i); };
    a.reduce(places, to, in_tensors<A::flat>(c.own_from, c.input), c.ranks, slot, c.rank, range, c.sum);
  }
};

// Chunk i of my slice: reduced into my output and, on a second ring, into every peer's slot.
template <class A>
struct Spread {
  A& a;
  const Call& c;
  Reduce<A> reduce{a, c};
  bool ok = true;

  PURLIN_FN void open() { announce(a, c); }
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) {
    Range range = reduce.mine(i);
    if (range.empty() || !ok || !(ok = reduce.ring().arrived(i, Own{c}) && sums().credited(i, OwnSum{c}))) return;
    auto to = [&](int k) {
      return k == 0 ? in_tensors<A::flat>(c.own_to, c.output) : in_slot(sums().slot_out(k - 1, i), range.lo);
    };
    reduce.add(c.ranks, to, i, range);
    int peers = c.peers();
    a.notify(2 * peers,
             [&](int k) { return k < peers ? reduce.ring().freed_out(k, i) : sums().ready_out(k - peers, i); });
  }
  PURLIN_FN void close() {
    reduce.close();
    sums().count_sent(OwnSum{c});
  }
  PURLIN_FN Ring<A> sums() const { return {a, c, Use::gather}; }
};

// The sums of the others, from the second ring: one ring for both halves would stand still.
template <class A>
struct Gather {
  A& a;
  const Call& c;
  Consume<A> sums{a, c, Use::gather, AtHome::consumer};

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return c.steps; }
  PURLIN_FN void step(int i) { sums.step(i); }
  PURLIN_FN void close() { sums.close(); }
};

}  // namespace purlin::snac
