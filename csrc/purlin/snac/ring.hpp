// One message a peer on a ring of slots: credit, copy, notify on one side, wait and let go on the other.
// `route(p)` is the wire that a peer's messages cut; message `step` of this call is number base + step of the channel.
#pragma once
#include "../atom/concept.hpp"

namespace purlin::snac {

template <class A>
struct Ring {
  A& a;
  const Call& c;
  Use use;

  PURLIN_FN Word sent(int p, int step) const { return a.sent(use, p) + step; }
  PURLIN_FN Word taken(int p, int step) const { return a.taken(use, p) + step; }
  PURLIN_FN Inbox mine() const { return {c.geometry, c.own_arena()}; }
  PURLIN_FN Inbox theirs(int p) const { return {c.geometry, c.peer_arena(p)}; }

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

  // Use::home, between two roles of this rank: message `step` to p has been staged, so what it was read from may be overwritten.
  PURLIN_FN Mark home_out(int p, int step) const { return {mine().home(p, a.team()), sent(p, step) + 1}; }
  PURLIN_FN Mark home_in(int p, int step) const { return {mine().home(p, a.team()), taken(p, step) + 1}; }

  template <class R>
  PURLIN_FN Range cut(R route, int p, int step) const {
    return route(p).range(step, a.team(), a.teams());
  }

  template <class R>
  PURLIN_FN bool credited(int step, R route) {
    Where where{Where::What::credit, use, step};
    return a.wait(
               c.peers(), [&](int p) { return cut(route, p, step).empty() ? Mark{} : credit(p, step); }, where) ==
           Arrival::yes;
  }
  template <class R>
  PURLIN_FN bool send(int step, R route, char* const* tensors) {
    if (!credited(step, route)) return false;
    for (int p = 0; p < c.peers(); ++p) {
      Range range = cut(route, p, step);
      if (!range.empty()) a.copy(in_slot(slot_out(p, step), range.lo), in_tensors<A::flat>(route(p), tensors), range);
    }
    int peers = c.peers();
    a.notify(c.onto_sent ? 2 * peers : peers, [&](int k) {
      int p = k < peers ? k : k - peers;
      if (cut(route, p, step).empty()) return Mark{};
      return k < peers ? ready_out(p, step) : Ring{a, c, Use::home}.home_out(p, step);
    });
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
      return Mark{c.count(p, a.team()).sent_on(use), sent(p, route(p).messages(a.team(), a.teams()))};
    });
  }
  template <class R>
  PURLIN_FN void count_taken(R route) {
    a.keep(c.peers(), [&](int p) {
      return Mark{c.count(p, a.team()).taken_on(use), taken(p, route(p).messages(a.team(), a.teams()))};
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

}  // namespace purlin::snac
