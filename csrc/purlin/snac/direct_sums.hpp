// Direct sums: of what peers lend. Rank p alone reads slice p of what each rank has lent, and adds.
//
//   a reduction lends its input; the sum goes to p's own output
//   an all-reduce lends its output, into which it has put its contributions (in place they lie there); the sum goes to every place that one came from
//
//   step 0:  the consuming role lends      step 1:  the staging role adds, when all have lent; the consuming role waits until all have added
#pragma once
#include "direct.hpp"

namespace purlin::snac {

template <class A>
struct StageSums {
  A& a;
  const Call& c;

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return 2; }
  PURLIN_FN void step(int i) {
    Range range = c.own_from.range(0, a.team(), a.teams());
    if (i == 0 || range.empty() || !lent()) return;
    add(range);
    a.notify(c.peers(), [&](int p) { return at().ready_out(p); });
  }
  PURLIN_FN void close() {
    a.keep(c.peers(),
           [&](int p) { return Mark{at().count(p).sent_on(Use::direct), at().sent(p) + at().live(c.own_from)}; });
  }
  PURLIN_FN Direct<A> at() const { return {a, c}; }
  PURLIN_FN bool lent() {
    auto line = [&](int p) { return at().granted(p, 0); };
    return a.expect(c.peers(), line, {Where::What::grant, Use::direct, 0}) == Arrival::yes;
  }
  PURLIN_FN void add(Range range) {  // a peer's `remote` is my slice of what it lends, in one stretch
    auto theirs = [&](int p) { return in_granted<true>(c.pair[p].remote, c.peer_arena(p), at().grant_in(p)); };
    auto to = [&](int k) { return k == 0 ? in_tensors<A::flat>(c.own_to, c.output) : theirs(k - 1); };
    auto slot = [&](int k) -> const char* { return theirs(c.peer_of(k)).first + range.lo; };
    int places = c.kind == Kind::reduce ? 1 : c.ranks;
    a.reduce(places, to, in_tensors<A::flat>(c.own_from, c.input), c.ranks, slot, c.rank, range, c.sum);
  }
};

template <class A>
struct ConsumeSums {
  A& a;
  const Call& c;

  PURLIN_FN void open() { announce(a, c); }
  PURLIN_FN int steps() const { return 2; }
  PURLIN_FN void step(int i) {
    if (i == 0) {
      for (int p = 0; c.kind == Kind::all_reduce && p < c.peers(); ++p) contribute(p);
      const char* tensor = c.kind == Kind::reduce ? c.input[0] : c.output[0];
      a.lend(c.peers(), [&](int p) { return at().live(slice(p)) ? at().offer(p, 0, tensor) : GrantMark{}; });
    } else {  // who has added his slice has read it here, too
      auto ready = [&](int p) { return at().live(slice(p)) ? at().ready_in(p) : Mark{}; };
      a.expect(c.peers(), ready, {Where::What::message, Use::direct, 0});
    }
  }
  PURLIN_FN void close() {
    a.keep(c.peers(), [&](int p) { return at().taken_after(p, slice(p)); });
  }
  PURLIN_FN Direct<A> at() const { return {a, c}; }
  PURLIN_FN const Route& slice(int p) const { return c.pair[p].send; }  // what peer p adds
  PURLIN_FN void contribute(int p) {                                    // to slice p; to my own I add from the input
    const Pair& pair = c.pair[p];
    Range range = pair.send.range(0, a.team(), a.teams());
    if (range.empty()) return;
    a.copy(in_tensors<A::flat>(pair.receive, c.output), in_tensors<A::flat>(pair.send, c.input), range);
  }
};

}  // namespace purlin::snac
