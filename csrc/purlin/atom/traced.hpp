// An Atom that writes down what another does: Traced<A> is an Atom wherever A is one that takes sets of peers one by one. The protocol knows nothing of it.
//
// An event begins before what it stands for and ends after it. So of a message a notify begins before the expect that it released ends, whatever the clocks
// of two cores do within that order; the ends of two ranks' events say nothing about each other.
#pragma once
#include "../trace.hpp"
#include "concept.hpp"

#include <chrono>

namespace purlin {

template <Atom A>
class Traced {
 public:
  static constexpr bool flat = A::flat;
  Traced(A& atom, const Call& call, Trace& trace) : a_(atom), c_(call), trace_(trace), number_(call.progress->calls) {}

  int team() const { return a_.team(); }
  int teams() const { return a_.teams(); }
  Word sent(Use use, int peer) const { return a_.sent(use, peer); }
  Word taken(Use use, int peer) const { return a_.taken(use, peer); }
  bool enter() { return a_.enter(); }
  void leave() { a_.leave(); }

  template <class C, class S>
  void both(int lag, C consume, S stage) {
    a_.both(lag, Acting<C>{consume, Event::Role::consume}, Acting<S>{stage, Event::Role::stage});
  }
  template <class G, class C, class S>
  void three(int lag, G gather, C consume, S stage) {
    a_.three(lag, Acting<G>{gather, Event::Role::consume}, Acting<C>{consume, Event::Role::consume},
             Acting<S>{stage, Event::Role::stage});
  }

  void ahead(Place from, Range range) { a_.ahead(from, range); }
  void copy(Place to, Place from, Range range) {
    i64 begin = now();
    a_.copy(to, from, range);
    if (to.shared) {
      int peer = owner_of(to.grants ? to.arena : to.first + range.lo);
      add(What::stage, peer, sent(at().use, peer) + at().step, range.hi - range.lo, begin);
    } else if (from.shared) {
      int peer = peer_in_slot(from.first + range.lo);
      add(What::consume, peer, taken(at().use, peer) + at().step, range.hi - range.lo, begin);
    } else {
      add(What::own, nobody, 0, range.hi - range.lo, begin);
    }
  }
  template <class T, class F>
  void reduce(int places, T to, Place own, int n, F slot, int self, Range range, Sum sum) {
    i64 begin = now();
    a_.reduce(1, to, own, n, slot, self, range, sum);
    add(What::consume, nobody, 0, range.hi - range.lo, begin);
    if (places > 1 && at().use == Use::ring) at().use = Use::gather;
    for (int k = 1; k < places; ++k) copy(to(k), to(0), range);
  }

  template <class C, class F, class G>
  Arrival put(int n, C credit, F source, G window, Where where) {
    if (Arrival got = wait(n, credit, where); got != Arrival::yes) return got;
    for (int p = 0; p < n; ++p) {
      Range range = source(p).range;
      if (range.empty()) continue;
      i64 begin = now();
      auto paid = [](int) { return Mark{}; };
      auto only = [&](int q) { return q == p ? source(q) : Bytes{}; };
      if (Arrival got = a_.put(n, paid, only, window, where); got != Arrival::yes) return got;
      add(What::stage, p, number_of(window(p).tag), range.hi - range.lo, begin);
    }
    return Arrival::yes;
  }
  template <class F>
  Arrival take(int n, F packet, Where where) {
    at() = where;
    for (int p = 0; p < n; ++p) {
      Packet in = packet(p);
      if (!in.window) continue;
      i64 begin = now();
      auto only = [&](int q) { return q == p ? in : Packet{}; };
      if (Arrival got = a_.take(n, only, where); got != Arrival::yes) return got;
      add(What::consume, p, number_of(in.tag), in.range.hi - in.range.lo, begin);
    }
    return Arrival::yes;
  }
  template <class F>
  Arrival take_reduce(Place to, Place own, int n, F packet, int self, Sum sum, Where where) {
    at() = where;
    i64 begin = now();
    if (Arrival got = a_.take_reduce(to, own, n, packet, self, sum, where); got != Arrival::yes) return got;
    Range all = packet(self).range;
    i64 end = now();
    write(What::consume, nobody, 0, all.hi - all.lo, begin, end);
    for (int k = 0; k < n; ++k)
      if (Packet in = packet(k); k != self && in.window)
        write(What::come, c_.peer_of(k), number_of(in.tag), 0, begin, end);
    return Arrival::yes;
  }

  template <class F>
  void notify(int n, F mark) {
    for (int k = 0; k < n; ++k) {
      Mark m = mark(k);
      if (!m.word) continue;
      i64 begin = now();
      a_.notify(n, [&](int q) { return q == k ? m : Mark{}; });
      int p = k % c_.peers();  // a peer may be told two words
      bool at_home = m.word == Inbox{c_.geometry, c_.own_arena()}.home(p, team());
      if (at_home) continue;  // another role of this rank is told
      i64 word = within_words(m.word, p), freed = c_.geometry.pair_words - line;
      if (word >= freed) {
        at().use = static_cast<Use>((word - freed) / static_cast<i64>(sizeof(Word)));
        add(What::let_go, p, m.value - 1, 0, begin);
      } else {
        at().use = word < ready_bytes() ? Use::ring : word < 2 * ready_bytes() ? Use::gather : Use::direct;
        add(What::notify, p, number_of(m.value), 0, begin);
      }
    }
  }
  template <class F>
  Arrival wait(int n, F mark, Where where) {
    if (where.what == Where::What::home) return a_.wait(n, mark, where);
    at() = where;
    return one_by_one(n, mark, [&](int p, Mark m, auto only) {
      i64 begin = now();
      Arrival got = a_.wait(n, only, where);
      add(What::wait, p, m.value, 0, begin);
      return got;
    });
  }
  template <class F>
  Arrival expect(int n, F mark, Where where) {
    at() = where;
    return one_by_one(n, mark, [&](int p, Mark m, auto only) {
      i64 begin = now();
      Arrival got = a_.expect(n, only, where);
      add(where.what == Where::What::grant ? What::wait : What::expect, p, number_of(m.value), 0, begin);
      return got;
    });
  }

  template <class F>
  void tell(int n, F mark) {
    a_.tell(n, mark);
  }
  template <class F>
  void grant(int n, F line) {
    show(n, line, [&](auto only) { a_.grant(n, only); });
  }
  template <class F>
  void lend(int n, F line) {
    show(n, line, [&](auto only) { a_.lend(n, only); });
  }
  template <class F>
  void keep(int n, F mark) {
    a_.keep(n, mark);
  }
  void meet() { a_.meet(); }
  void drain() { a_.drain(); }

 private:
  using What = Event::What;
  static constexpr int nobody = -1;

  // A role that says who it is before each thing it does: in lockstep both are on one thread.
  template <class R>
  struct Acting {
    R role;
    Event::Role who;

    void open() { acting_ = who, role.open(); }
    int steps() const { return role.steps(); }
    void step(int i) { acting_ = who, role.step(i); }
    void close() { acting_ = who, role.close(); }
  };

  static i64 now() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }
  Where& at() { return last_[static_cast<int>(acting_)]; }  // what this role waited for last
  void add(What what, int peer, Word message, i64 bytes, i64 begin) { write(what, peer, message, bytes, begin, now()); }
  void write(What what, int peer, Word message, i64 bytes, i64 begin, i64 end) {
    int rank = peer == nobody ? nobody : c_.rank_of(peer);
    Event event{what, acting_, at().use, team(), at().step, rank, number_, message, bytes, begin, end};
    trace_.add(event);
  }
  template <class F, class G>
  void show(int n, F line, G act) {
    at() = {Where::What::grant, Use::direct, 0};
    for (int p = 0; p < n; ++p) {
      GrantMark m = line(p);
      if (!m.line) continue;
      i64 begin = now();
      act([&](int q) { return q == p ? m : GrantMark{}; });
      add(What::grant, p, number_of(m.value.tag), 0, begin);
    }
  }
  template <class F, class G>
  Arrival one_by_one(int n, F mark, G act) {
    for (int i = 0; i < n; ++i) {
      Mark m = mark(i);
      if (!m.word) continue;
      int p = c_.peer_of_mark(i);
      Arrival got = act(p, m, [&](int q) { return q == p ? m : Mark{}; });
      if (got != Arrival::yes) return got;
    }
    return Arrival::yes;
  }
  // Whose arena an address lies in, and from whom what lies in an inbox slot has come.
  int owner_of(const char* address) const {
    for (int p = 0; p < c_.peers(); ++p)
      if (address >= c_.peer_arena(p) && address < c_.peer_arena(p) + c_.geometry.arena_bytes) return p;
    return nobody;
  }
  int peer_in_slot(const char* address) const {
    const Geometry& g = c_.geometry;
    i64 slot = (address - c_.own_arena() - g.rings_at) / g.slot_bytes;
    return static_cast<int>(slot / (2 * g.slots) / g.teams);
  }

  // Where a word lies among those of a peer and team.
  i64 within_words(const Word* word, int p) const {
    const Geometry& g = c_.geometry;
    return (reinterpret_cast<const char*>(word) - c_.peer_arena(p) - g.words_at) % g.pair_words;
  }
  i64 ready_bytes() const { return round_up(c_.geometry.slots * static_cast<i64>(sizeof(Word)), line); }

  A& a_;
  const Call& c_;
  Trace& trace_;
  Word number_;
  Where last_[2] = {};
  inline static thread_local Event::Role acting_ = Event::Role::consume;
};

}  // namespace purlin
