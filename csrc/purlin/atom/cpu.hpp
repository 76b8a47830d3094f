// The CPU Atom: ranks are processes or threads over shared memory. Copies are memcpy, words are std::atomic_ref, packets are lines of 56 + 8 bytes.
// A wait spins a little, then yields, then sleeps, so that more ranks than cores still run well.
#pragma once
#include "../fault.hpp"
#include "../numeric.hpp"
#include "concept.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <sched.h>
#include <thread>
#include <time.h>

namespace purlin::cpu {

constexpr i64 payload_bytes = 56, line_bytes = 64;  // a packet line: payload, then tag
PURLIN_FN constexpr i64 lines_of(i64 bytes) { return ceil_div(bytes, payload_bytes); }

using Clock = std::chrono::steady_clock;
inline std::atomic_ref<Word> shared(Word* word) {
  static_assert(std::atomic_ref<Word>::is_always_lock_free);
  return std::atomic_ref<Word>(*word);
}

// ---- when a call fails --------------------------------------------------------------------------------------------------------------------------------

inline void poison(const Geometry& g, char* arena, Poison what) {
  Word none = 0;
  shared(Inbox{g, arena}.poison()).compare_exchange_strong(none, encode(what), std::memory_order_acq_rel);
}

struct Host {  // what a call needs of the process it runs in
  std::chrono::nanoseconds timeout{std::chrono::seconds(300)};
  bool (*interrupted)() = nullptr;  // asked ten times a second in slow waits; true: give up
  Record record{};
};

// ---- waiting ------------------------------------------------------------------------------------------------------------------------------------------

class Patience {  // of one role in one call
 public:
  enum class Step { go_on, look_around, expired, ask };

  Step next() {
    if (++polls_ <= spins) return relax();
    if (polls_ == spins + 1) start_ = asked_ = Clock::now();
    if (polls_ % 16) return give_way();
    auto now = Clock::now();
    if (now - start_ > std::chrono::milliseconds(1)) doze(now - start_);
    if (now - asked_ > std::chrono::milliseconds(100)) return asked_ = now, Step::ask;
    return Step::look_around;
  }
  void begin() { polls_ = 0; }
  std::chrono::nanoseconds waited() const { return polls_ <= spins ? std::chrono::nanoseconds(0) : Clock::now() - start_; }

 private:
  static constexpr int spins = 128;

  static Step relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return Step::go_on;
  }
  static Step give_way() {
    sched_yield();
    return Step::go_on;
  }
  static void doze(std::chrono::nanoseconds waited) {
    timespec nap{0, static_cast<long>(std::min<i64>(waited.count() / 16, 1000000))};
    nanosleep(&nap, nullptr);
  }

  long polls_ = 0;
  Clock::time_point start_, asked_;
};

// ---- the Atom -------------------------------------------------------------------------------------------------------------------------------------------

enum class Roles { lockstep, side_by_side };

template <Roles roles = Roles::lockstep>
class Cpu {
 public:
  Cpu(const Call& call, int team, Host& host) : call_(call), team_(team), host_(host) {}

  int team() const { return team_; }
  int teams() const { return call_.teams; }
  bool enter() const { return !poisoned(); }
  void leave() {
    if (shared(&call_.progress->left).fetch_add(1) + 1 < static_cast<Word>(call_.teams)) return;
    call_.progress->left = 0;
    ++call_.progress->calls;
  }

  template <class C, class S>
  void both(int lag, C consume, S stage) {
    if constexpr (roles == Roles::side_by_side) {
      std::thread other([&] {
        role_ = 1;
        consume.open();
        for (int i = 0; i < consume.steps(); ++i) consume.step(i);
        consume.close();
      });
      role_ = 0;
      stage.open();
      for (int i = 0; i < stage.steps(); ++i) stage.step(i);
      stage.close();
      other.join();
    } else {
      consume.open();
      stage.open();
      int last = std::max(stage.steps(), consume.steps() + lag);
      for (int i = 0; i < last; ++i) {
        if (i < stage.steps()) stage.step(i);
        if (i >= lag && i - lag < consume.steps()) consume.step(i - lag);
      }
      stage.close();
      consume.close();
    }
  }

  void copy(Place to, Place from, Range range) {
    for_each_piece(to, from, range, [](char* write, const char* read, i64 bytes) {
      if (write != read) std::memcpy(write, read, static_cast<std::size_t>(bytes));
    });
  }
  template <class F>
  void reduce(Place to, Place own, int n, F slot, int self, Range range, Sum sum) {
    const char* from[max_ranks];
    for (int k = 0; k < n; ++k) from[k] = k == self ? nullptr : slot(k);
    reduce_lines(to, own, n, from, self, range, sum);
  }

  template <class F>
  void put(int n, F packet) {
    for (int p = 0; p < n; ++p) {
      Packet out = packet(p);
      if (out.window) put_lines(out);
    }
  }
  template <class F>
  Arrival take(int n, F packet, Where where) {
    for (int p = 0; p < n; ++p) {
      Packet in = packet(p);
      if (!in.window) continue;
      Cursor write(in.place, in.range.lo);
      for (i64 lo = in.range.lo; lo < in.range.hi; lo += payload_bytes) {
        char* line = in.window + (lo - in.range.lo) / payload_bytes * line_bytes;
        if (Arrival got = line_of(line, in.tag, p, where); got != Arrival::yes) return got;
        scatter(write, line, smaller(payload_bytes, in.range.hi - lo));
      }
    }
    return Arrival::yes;
  }
  template <class F>
  Arrival take_reduce(Place to, Place own, int n, F packet, int self, Sum sum, Where where) {
    Packet in[max_ranks];
    for (int k = 0; k < n; ++k) in[k] = packet(k);
    Range all = in[self].range;
    for (i64 lo = all.lo; lo < all.hi; lo += payload_bytes) {
      const char* from[max_ranks];
      for (int k = 0; k < n; ++k) {
        if (k == self) continue;
        char* line = in[k].window + (lo - all.lo) / payload_bytes * line_bytes;
        if (Arrival got = line_of(line, in[k].tag, call_.peer_of(k), where); got != Arrival::yes) return got;
        from[k] = line;
      }
      reduce_lines(to, own, n, from, self, {lo, smaller(lo + payload_bytes, all.hi)}, sum);
    }
    return Arrival::yes;
  }

  template <class F>
  void notify(int n, F mark) {
    for (int p = 0; p < n; ++p) {
      Mark m = mark(p);
      if (m.word) shared(m.word).store(m.value, std::memory_order_release);
    }
  }
  template <class F>
  void tell(int n, F mark) {
    notify(n, mark);
  }
  template <class F>
  void grant(int n, F line) {
    for (int p = 0; p < n; ++p) {
      GrantMark m = line(p);
      if (!m.line) continue;
      shared(&m.line->place).store(m.value.place, std::memory_order_relaxed);
      shared(&m.line->tag).store(m.value.tag, std::memory_order_release);
    }
  }
  template <class F>
  void keep(int n, F mark) {
    for (int p = 0; p < n; ++p) {
      Mark m = mark(p);
      if (m.word) *m.word = m.value;
    }
  }
  template <class F>
  Arrival wait(int n, F mark, Where where) {
    for (int p = 0; p < n; ++p) {
      Mark m = mark(p);
      if (!m.word) continue;
      auto come = [&] { return shared(m.word).load(std::memory_order_acquire) >= m.value; };
      if (Arrival got = until(come, p, where); got != Arrival::yes) return got;
    }
    return Arrival::yes;
  }
  template <class F>
  Arrival expect(int n, F mark, Where where) {
    for (int p = 0; p < n; ++p) {
      Mark m = mark(p);
      if (!m.word) continue;
      if (Arrival got = tagged(m.word, m.value, p, where); got != Arrival::yes) return got;
      if (where.what == Where::What::grant && !allowed(m.word, p)) return fail(Fault::grant, p, where);
    }
    return Arrival::yes;
  }
  void meet() {
    if constexpr (roles == Roles::side_by_side) {
      met_.fetch_add(1);
      while (met_.load() < 2) sched_yield();
    }
  }
  void drain() {}

 private:
  bool poisoned() const { return shared(Inbox{call_.geometry, call_.own_arena()}.poison()).load(std::memory_order_acquire) != 0; }

  // -- waits
  template <class F>
  Arrival until(F come, int peer, Where where) {
    Patience& patience = patience_[roles == Roles::side_by_side ? role_ : 0];
    patience.begin();
    while (!come()) {
      switch (patience.next()) {
        case Patience::Step::ask:
          if (host_.interrupted && host_.interrupted()) return fail(Fault::interrupted, peer, where);
          complain(patience.waited(), peer, where);
          [[fallthrough]];
        case Patience::Step::look_around:
          if (poisoned()) return Arrival::never;
          if (patience.waited() > std::chrono::milliseconds(1) && is_elsewhere(peer) && !come()) return fail(Fault::mismatch, peer, where);
          if (patience.waited() > host_.timeout) return fail(Fault::stall, peer, where);
          break;
        default: break;
      }
    }
    return Arrival::yes;
  }
  Arrival tagged(Word* word, Word tag, int peer, Where where) {
    auto come = [&] { return number_of(shared(word).load(std::memory_order_acquire)) == number_of(tag); };
    if (Arrival got = until(come, peer, where); got != Arrival::yes) return got;
    if (shared(word).load(std::memory_order_relaxed) != tag) return fail(Fault::mismatch, peer, where);
    return Arrival::yes;
  }
  Arrival line_of(char* line, Word tag, int peer, Where where) {
    return tagged(reinterpret_cast<Word*>(line + payload_bytes), tag, peer, where);
  }
  bool is_elsewhere(int peer) const {
    Word post = shared(Inbox{call_.geometry, call_.own_arena()}.post(peer)).load(std::memory_order_acquire);
    return elsewhere(post, call_.progress->calls, call_.signature);
  }
  bool allowed(Word* tag, int peer) const {
    const Geometry& g = call_.geometry;
    i64 place = static_cast<i64>(tag[-1]);
    return place >= g.heap_at && place <= g.arena_bytes - call_.pair[peer].reach;
  }
  Arrival fail(Fault fault, int peer, Where where) {
    host_.record = {where, team_, call_.rank_of(peer)};
    Poison what{fault, call_.rank, call_.rank_of(peer)};
    for (int r = 0; r < call_.ranks; ++r) poison(call_.geometry, call_.arena[r], what);
    return fault == Fault::mismatch ? Arrival::other : Arrival::never;
  }
  void complain(std::chrono::nanoseconds waited, int peer, Where where) {
    if (complained_ || waited < std::chrono::seconds(10)) return;
    complained_ = true;
    std::fprintf(stderr, "purlin: rank %d has waited 10 s for rank %d (team %d, step %d)\n", call_.rank, call_.rank_of(peer), team_, where.step);
  }

  // -- bytes
  static void put_lines(const Packet& out) {
    Cursor read(out.place, out.range.lo);
    char* line = out.window;
    for (i64 lo = out.range.lo; lo < out.range.hi; lo += payload_bytes, line += line_bytes) {
      gather(line, read, smaller(payload_bytes, out.range.hi - lo));
      shared(reinterpret_cast<Word*>(line + payload_bytes)).store(out.tag, std::memory_order_release);
    }
  }
  static void gather(char* line, Cursor& read, i64 bytes) {
    for (i64 done = 0; done < bytes;) {
      i64 piece = smaller(bytes - done, read.left());
      if (read.at()) std::memcpy(line + done, read.at(), static_cast<std::size_t>(piece));
      read.advance(piece);
      done += piece;
    }
  }
  static void scatter(Cursor& write, const char* line, i64 bytes) {
    for (i64 done = 0; done < bytes;) {
      i64 piece = smaller(bytes - done, write.left());
      if (write.at()) std::memcpy(write.at(), line + done, static_cast<std::size_t>(piece));
      write.advance(piece);
      done += piece;
    }
  }
  static void reduce_lines(Place to, Place own, int n, const char* const* from, int self, Range range, Sum sum) {
    i64 done = 0;
    Cursor write(to, range.lo), read(own, range.lo);
    while (done < range.hi - range.lo) {
      i64 bytes = smaller(range.hi - range.lo - done, smaller(write.left(), read.left()));
      if (write.at() && read.at()) {
        const char* at[max_ranks];
        for (int k = 0; k < n; ++k) at[k] = k == self ? read.at() : from[k] + done;
        reduce_piece(write.at(), n, at, bytes, sum);
      }
      write.advance(bytes);
      read.advance(bytes);
      done += bytes;
    }
  }
  static void reduce_piece(char* to, int n, const char* const* from, i64 bytes, Sum sum) {
    numeric::with_dtype(sum.dtype, [&](auto type) {
      switch (sum.op) {
        case Op::sum: return fold<Op::sum, decltype(type)>(to, n, from, bytes);
        case Op::avg: return fold<Op::avg, decltype(type)>(to, n, from, bytes);
        case Op::max: return fold<Op::max, decltype(type)>(to, n, from, bytes);
        case Op::min: return fold<Op::min, decltype(type)>(to, n, from, bytes);
      }
    });
  }
  template <Op op, class T>
  static void fold(char* to, int n, const char* const* from, i64 bytes) {
    using Stored = typename T::Stored;
    using Wide = typename T::Wide;
    constexpr i64 most = 512;
    Wide wide[most];
    Stored stored[most];
    for (i64 at = 0, count = bytes / static_cast<i64>(sizeof(Stored)); at < count; at += most) {
      i64 m = smaller(most, count - at);
      auto size = static_cast<std::size_t>(m) * sizeof(Stored);
      for (int k = 0; k < n; ++k) {
        std::memcpy(stored, from[k] + at * static_cast<i64>(sizeof(Stored)), size);
        if (k == 0) {
          for (i64 i = 0; i < m; ++i) wide[i] = T::widen(stored[i]);
        } else {
          for (i64 i = 0; i < m; ++i) wide[i] = numeric::join<op>(wide[i], T::widen(stored[i]));
        }
      }
      if constexpr (op == Op::avg)
        for (i64 i = 0; i < m; ++i) wide[i] = wide[i] / static_cast<Wide>(n);
      for (i64 i = 0; i < m; ++i) stored[i] = T::narrow(wide[i]);
      std::memcpy(to + at * static_cast<i64>(sizeof(Stored)), stored, size);
    }
  }

  const Call& call_;
  int team_;
  Host& host_;
  Patience patience_[2];
  std::atomic<int> met_{0};
  bool complained_ = false;
  inline static thread_local int role_ = 0;
};

}  // namespace purlin::cpu
