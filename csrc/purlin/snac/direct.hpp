// Direct: the reader grants its outputs on entry, the source writes them.
#pragma once
#include "entry.hpp"

namespace purlin::snac {

template <class A>
struct Direct {
  A& a;
  const Call& c;

  PURLIN_FN Counts& count(int p) const { return c.count(p, a.team()); }
  PURLIN_FN Word sent(int p) const { return a.sent(Use::direct, p); }
  PURLIN_FN Word taken(int p) const { return a.taken(Use::direct, p); }
  PURLIN_FN bool live(const Route& route) const { return !route.range(0, a.team(), a.teams()).empty(); }
  PURLIN_FN Inbox mine() const { return {c.geometry, c.own_arena()}; }
  PURLIN_FN Inbox theirs(int p) const { return {c.geometry, c.peer_arena(p)}; }
  PURLIN_FN Grant* grant_in(int p) const { return mine().grants(p, a.team()); }

  PURLIN_FN Mark granted(int p, int k) const {  // what I wait for: output k of peer p
    return {&grant_in(p)[k].tag, tag(sent(p), c.pair[p].send_signature)};
  }
  PURLIN_FN GrantMark offer(int p, int k, const char* tensor) const {  // what it says
    Grant* line = theirs(p).grants(c.as_seen_by(p), a.team()) + k;
    return {line, {static_cast<Word>(tensor - c.own_arena()), tag(taken(p), c.pair[p].receive_signature)}};
  }
  PURLIN_FN Mark ready_out(int p) const {
    return {theirs(p).ready(c.as_seen_by(p), a.team(), Use::direct, 0), tag(sent(p), c.pair[p].send_signature)};
  }
  PURLIN_FN Mark ready_in(int p) const {
    return {mine().ready(p, a.team(), Use::direct, 0), tag(taken(p), c.pair[p].receive_signature)};
  }
  PURLIN_FN Mark taken_after(int p, const Route& route) const {  // the count as a call with this message leaves it
    return {count(p).taken_on(Use::direct), taken(p) + live(route)};
  }
};

template <class A>
struct StageDirect {
  A& a;
  const Call& c;
  bool ok = true;

  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return 1; }
  PURLIN_FN void step(int) {
    ahead();
    ok = granted();
    for (int p = 0; ok && p < c.peers(); ++p) push(p);
    if (ok) a.notify(c.peers(), [&](int p) { return at().live(c.pair[p].send) ? at().ready_out(p) : Mark{}; });
  }
  PURLIN_FN void close() {
    a.keep(c.peers(),
           [&](int p) { return Mark{at().count(p).sent_on(Use::direct), at().sent(p) + at().live(c.pair[p].send)}; });
  }
  PURLIN_FN Direct<A> at() const { return {a, c}; }
  // What is sent may be read while grants are on their way: inputs are ready when the call begins, and nobody writes them before it ends.
  PURLIN_FN void ahead() {
    for (int p = 0; p < c.peers(); ++p)
      if (Range range = cut(p); !range.empty()) a.ahead(source(p), range);
  }
  PURLIN_FN bool granted() {  // all outputs of all peers
    auto grant = [&](int i) {
      int p = c.peer_of_mark(i);
      return at().live(c.pair[p].send) ? at().granted(p, i / c.peers()) : Mark{};
    };
    return a.expect(c.grants * c.peers(), grant, {Where::What::grant, Use::direct, 0}) == Arrival::yes;
  }
  PURLIN_FN void push(int p) {
    if (Range range = cut(p); !range.empty())
      a.copy(in_granted<A::flat>(c.pair[p].remote, c.peer_arena(p), at().grant_in(p)), source(p), range);
  }
  PURLIN_FN Range cut(int p) const { return c.pair[p].send.range(0, a.team(), a.teams()); }
  PURLIN_FN Place source(int p) const { return in_tensors<A::flat>(c.pair[p].send, c.input); }
};

template <class A>
struct ConsumeDirect {
  A& a;
  const Call& c;

  PURLIN_FN void open() {
    announce(a, c);
    for (int k = 0; k < c.grants; ++k)
      a.grant(c.peers(),
              [&](int p) { return at().live(c.pair[p].receive) ? at().offer(p, k, c.output[k]) : GrantMark{}; });
  }
  PURLIN_FN int steps() const { return 1; }
  PURLIN_FN void step(int) {
    copy_own(a, c, 0);  // while the messages are on their way
    auto ready = [&](int p) { return at().live(c.pair[p].receive) ? at().ready_in(p) : Mark{}; };
    a.expect(c.peers(), ready, {Where::What::message, Use::direct, 0});
  }
  PURLIN_FN void close() {
    a.keep(c.peers(), [&](int p) { return at().taken_after(p, c.pair[p].receive); });
  }
  PURLIN_FN Direct<A> at() const { return {a, c}; }
};

}  // namespace purlin::snac
