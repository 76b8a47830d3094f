// Packets: one message a peer, payload and tag in one line. The credit is paid when the reader next enters a call.
#pragma once
#include "entry.hpp"

namespace purlin::snac {

template <class A>
struct Packets {
  A& a;
  const Call& c;

  PURLIN_FN Counts& count(int p) const { return c.count(p, a.team()); }
  PURLIN_FN Word sent(int p) const { return a.sent(Use::packet, p); }
  PURLIN_FN Word taken(int p) const { return a.taken(Use::packet, p); }
  PURLIN_FN Range cut(const Route& route) const { return route.range(0, a.team(), a.teams()); }
  PURLIN_FN Inbox mine() const { return {c.geometry, c.own_arena()}; }
  PURLIN_FN Inbox theirs(int p) const { return {c.geometry, c.peer_arena(p)}; }
  PURLIN_FN Packet in(int p, const Route& route, const Place& to) const {
    if (cut(route).empty()) return {};
    return {mine().window(p, a.team(), taken(p)), tag(taken(p), c.pair[p].receive_signature), to, cut(route)};
  }
  PURLIN_FN Bytes source(int p) const {
    const Route& route = c.pair[p].send;
    return {in_tensors<A::flat>(route, c.input), cut(route)};
  }
  PURLIN_FN Lines window_out(int p) const {
    return {theirs(p).window(c.as_seen_by(p), a.team(), sent(p)), tag(sent(p), c.pair[p].send_signature)};
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
    auto source = [&](int p) { return all().source(p); };
    auto window = [&](int p) { return all().window_out(p); };
    ok = a.put(c.peers(), credit, source, window, {Where::What::credit, Use::packet, 0}) == Arrival::yes;
    if (ok) copy_own(a, c, 0);
    if (c.kind != Kind::copy) a.meet();  // an all-reduce onto itself overwrites what was just put
  }
  PURLIN_FN void close() {
    a.keep(c.peers(), [&](int p) {
      return Mark{all().count(p).sent_on(Use::packet), all().sent(p) + !all().cut(c.pair[p].send).empty()};
    });
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
    if (c.kind == Kind::copy) {
      a.take(
          c.peers(),
          [&](int p) { return all().in(p, c.pair[p].receive, in_tensors<A::flat>(c.pair[p].receive, c.output)); },
          where);
      return;
    }
    a.meet();
    if (!all().cut(c.own_from).empty()) {
      Place to = in_tensors<A::flat>(c.own_to, c.output), own = in_tensors<A::flat>(c.own_from, c.input);
      auto packet = [&](int k) {
        return k == c.rank ? Packet{nullptr, 0, own, all().cut(c.own_from)} : all().in(c.peer_of(k), c.own_from, to);
      };
      a.take_reduce(to, own, c.ranks, packet, c.rank, c.sum, where);
    }
  }
  PURLIN_FN void close() {
    auto due = [&](int p) -> const Route& { return c.kind == Kind::copy ? c.pair[p].receive : c.own_from; };
    a.keep(c.peers(), [&](int p) {
      return Mark{all().count(p).taken_on(Use::packet), all().taken(p) + !all().cut(due(p)).empty()};
    });
  }
  PURLIN_FN Packets<A> all() const { return {a, c}; }
};

}  // namespace purlin::snac
