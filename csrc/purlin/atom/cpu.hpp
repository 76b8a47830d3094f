// The CPU Atom: ranks are processes or threads over shared memory. Copies are memcpy, words are std::atomic_ref, packets are lines of 56 + 8 bytes.
// A wait spins a little, then yields, then sleeps, so that more ranks than cores still run well.
#pragma once
#include "../fault.hpp"
#include "../numeric.hpp"
#include "concept.hpp"
#include "streaming.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <sched.h>
#include <thread>
#include <time.h>

namespace purlin::cpu {

constexpr i64 large_message = 3 << 19;              // bytes
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
  std::atomic_flag recorded;  // the first failed wait stays
};

// ---- waiting ------------------------------------------------------------------------------------------------------------------------------------------

class Patience {  // of one role in one call
 public:
  enum class Step { go_on, look_around, ask };

  Step next() {
    if (++polls_ <= spins) return relax();
    if (polls_ == spins + 1) slow_down();
    if (polls_ % 16) return give_way();
    auto now = Clock::now();
    if (now - start_ > std::chrono::milliseconds(1)) doze(now - start_);
    if (now - asked_ > std::chrono::milliseconds(100)) return asked_ = now, Step::ask;
    return Step::look_around;
  }
  void begin() { polls_ = 0; }
  std::chrono::nanoseconds waited() const {
    return polls_ <= spins ? std::chrono::nanoseconds(0) : Clock::now() - start_;
  }
  std::chrono::nanoseconds since_first() const { return Clock::now() - first_; }  // slow wait of the call

 private:
  static constexpr int spins = 128;

  void slow_down() {
    start_ = Clock::now();
    if (first_ == Clock::time_point{}) first_ = asked_ = start_;
  }
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
  Clock::time_point start_, first_, asked_;
};

// ---- the Atom -------------------------------------------------------------------------------------------------------------------------------------------

enum class Roles { lockstep, side_by_side };

template <Roles roles = Roles::lockstep>
class Cpu {
 public:
  static constexpr bool flat = false;
  Cpu(const Call& call, int team, Host& host) : call_(call), team_(team), host_(host), large_(is_large(call)) {}

  int team() const { return team_; }
  int teams() const { return call_.teams; }
  Word sent(Use use, int peer) const { return *call_.count(peer, team_).sent_on(use); }
  Word taken(Use use, int peer) const { return *call_.count(peer, team_).taken_on(use); }
  bool enter() const { return !poisoned(); }
  void leave() {
    settle();
    if (failed_) return;  // it stays the call that ranks speak of
    if (shared(&call_.progress->left).fetch_add(1) + 1 < static_cast<Word>(call_.teams)) return;
    call_.progress->left = 0;
    ++call_.progress->calls;
  }

  template <class C, class S>
  void both(int lag, C consume, S stage) {
    three(lag, concepts::Role{}, consume, stage);
  }
  template <class G, class C, class S>
  void three(int lag, G gather, C consume, S stage) {
    if constexpr (roles == Roles::side_by_side) {
      std::thread second([&] { live(consume, 1); });
      if constexpr (std::is_same_v<G, concepts::Role>) {
        live(stage, 0);
      } else {
        std::thread third([&] { live(gather, 2); });
        live(stage, 0);
        third.join();
      }
      second.join();
    } else {
      consume.open();
      gather.open();
      stage.open();
      int last = std::max({stage.steps(), consume.steps() + lag, gather.steps() + 2 * lag});
      for (int i = 0; i < last; ++i) {
        if (i < stage.steps()) stage.step(i);
        if (i >= lag && i - lag < consume.steps()) consume.step(i - lag);
        if (i >= 2 * lag && i - 2 * lag < gather.steps()) gather.step(i - 2 * lag);
      }
      stage.close();
      consume.close();
      gather.close();
    }
  }

  void ahead(const Place&, Range) const {}  // a processor that copies reads ahead by itself
  void copy(Place to, Place from, Range range) {
    bool past_cache = large_ || to.shared;  // another core reads it next
    for_each_piece(to, from, range, [past_cache](char* write, const char* read, i64 bytes) {
      if (write == read) return;
      if (past_cache && bytes >= least_streamed) {
        stream(write, read, bytes);
      } else {
        std::memcpy(write, read, static_cast<std::size_t>(bytes));
      }
    });
  }
  template <class T, class F>
  void reduce(int places, T to, Place own, int n, F slot, int self, Range range, Sum sum) {
    const char* from[max_ranks];
    for (int k = 0; k < n; ++k) from[k] = k == self ? nullptr : slot(k);
    Cursor write(to(0), range.lo), read(own, range.lo);
    reduce_bytes(write, read, n, from, self, range.hi - range.lo, sum);
    for (int k = 1; k < places; ++k) copy(to(k), to(0), range);
  }

  template <class C, class F, class G>
  Arrival put(int n, C credit, F source, G window, Where where) {
    if (Arrival got = wait(n, credit, where); got != Arrival::yes) return got;
    for (int p = 0; p < n; ++p)
      if (Bytes out = source(p); !out.range.empty()) put_lines(out, window(p));
    return Arrival::yes;
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
    Cursor write(to, all.lo), read(own, all.lo);
    for (i64 lo = all.lo; lo < all.hi; lo += payload_bytes) {
      const char* from[max_ranks];
      for (int k = 0; k < n; ++k) {
        if (k == self) continue;
        char* line = in[k].window + (lo - all.lo) / payload_bytes * line_bytes;
        if (Arrival got = line_of(line, in[k].tag, call_.peer_of(k), where); got != Arrival::yes) return got;
        from[k] = line;
      }
      reduce_bytes(write, read, n, from, self, smaller(payload_bytes, all.hi - lo), sum);
    }
    return Arrival::yes;
  }

  template <class F>
  void notify(int n, F mark) {
    settle();
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
  void lend(int n, F line) {
    settle();
    grant(n, line);
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
    for (int i = 0; i < n; ++i) {
      Mark m = mark(i);
      if (!m.word) continue;
      int p = call_.peer_of_mark(i);
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
  template <class R>
  static void live(R& behaves, int role) {
    role_ = role;
    behaves.open();
    for (int i = 0; i < behaves.steps(); ++i) behaves.step(i);
    settle();  // leave() does it on one thread, for the stores of that thread alone
    behaves.close();
  }
  // Too much to find in a cache afterwards?
  static bool is_large(const Call& call) {
    i64 most = 0;
    for (int p = 0; p < call.peers(); ++p)
      most = larger(most, larger(call.pair[p].send.bytes, call.pair[p].receive.bytes));
    return most >= large_message;
  }
  bool poisoned() const {
    return shared(Inbox{call_.geometry, call_.own_arena()}.poison()).load(std::memory_order_acquire) != 0;
  }

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
          if (poisoned()) return failed_ = true, Arrival::never;
          if (where.what != Where::What::home && patience.waited() > std::chrono::milliseconds(1))
            if (Fault why = hopeless(peer); why != Fault::none && !come()) return fail(why, peer, where);
          if (patience.since_first() > host_.timeout) return fail(Fault::stall, peer, where);
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
  // Why what is missing of this peer will never come.
  Fault hopeless(int peer) const {
    Word post = shared(Inbox{call_.geometry, call_.own_arena()}.post(peer)).load(std::memory_order_acquire);
    if (post == farewell) return Fault::left;
    return elsewhere(post, call_.progress->calls, call_.signature) ? Fault::mismatch : Fault::none;
  }
  bool allowed(Word* tag, int peer) const {
    const Geometry& g = call_.geometry;
    i64 place = static_cast<i64>(tag[-1]);
    return place >= g.heap_at && place <= g.arena_bytes - call_.pair[peer].reach;
  }
  Arrival fail(Fault fault, int peer, Where where) {
    failed_ = true;
    if (!host_.recorded.test_and_set()) host_.record = {where, team_, call_.rank_of(peer)};
    int about = call_.rank_of(peer);
    Poison what{fault, fault == Fault::left ? about : call_.rank, about};
    for (int r = 0; r < call_.ranks; ++r) poison(call_.geometry, call_.arena[r], what);
    return fault == Fault::mismatch ? Arrival::other : Arrival::never;
  }
  void complain(std::chrono::nanoseconds waited, int peer, Where where) {
    bool& complained = complained_[roles == Roles::side_by_side ? role_ : 0];
    if (complained || waited < std::chrono::seconds(10)) return;
    complained = true;
    std::fprintf(stderr, "purlin: rank %d has waited 10 s for rank %d (team %d, step %d)\n", call_.rank,
                 call_.rank_of(peer), team_, where.step);
  }

  // -- bytes
  static void put_lines(const Bytes& out, Lines lines) {
    Cursor read(out.place, out.range.lo);
    char* line = lines.window;
    for (i64 lo = out.range.lo; lo < out.range.hi; lo += payload_bytes, line += line_bytes) {
      gather(line, read, smaller(payload_bytes, out.range.hi - lo));
      shared(reinterpret_cast<Word*>(line + payload_bytes)).store(lines.tag, std::memory_order_release);
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
  static void reduce_bytes(Cursor& write, Cursor& read, int n, const char* const* from, int self, i64 bytes, Sum sum) {
    for (i64 done = 0; done < bytes;) {
      i64 piece = smaller(bytes - done, smaller(write.left(), read.left()));
      if (write.at() && read.at()) {
        const char* at[max_ranks];
        for (int k = 0; k < n; ++k) at[k] = k == self ? read.at() : from[k] + done;
        reduce_piece(write.at(), n, at, piece, sum);
      }
      write.advance(piece);
      read.advance(piece);
      done += piece;
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
    constexpr i64 size = sizeof(typename T::Stored);
    std::integral_constant<i64, 64> block;  // elements: a count that the compiler knows makes vectors
    i64 at = 0;
    for (; at + block * size <= bytes; at += block * size) fold_block<op, T>(to, n, from, at, block);
    if (at < bytes) fold_block<op, T>(to, n, from, at, (bytes - at) / size);
  }
  // Loads all before it stores: `to` may be one of `from`.
  template <Op op, class T, class Count>
  static void fold_block(char* to, int n, const char* const* from, i64 at, Count count) {
    typename T::Wide sum[64];
    for (i64 i = 0; i < count; ++i) sum[i] = load<T>(from[0] + at, i);
    for (int k = 1; k < n; ++k)
      for (i64 i = 0; i < count; ++i) sum[i] = numeric::join<op>(sum[i], load<T>(from[k] + at, i));
    for (i64 i = 0; i < count; ++i) {
      if constexpr (op == Op::avg) sum[i] = sum[i] / static_cast<typename T::Wide>(n);
      typename T::Stored rounded = T::narrow(sum[i]);
      std::memcpy(to + at + i * static_cast<i64>(sizeof rounded), &rounded, sizeof rounded);
    }
  }
  template <class T>
  static typename T::Wide load(const char* from, i64 i) {
    typename T::Stored value;
    std::memcpy(&value, from + i * static_cast<i64>(sizeof value), sizeof value);
    return T::widen(value);
  }

  const Call& call_;
  int team_;
  Host& host_;
  bool large_;
  Patience patience_[3];
  std::atomic<int> met_{0};
  bool complained_[3] = {};
  std::atomic<bool> failed_{false};
  inline static thread_local int role_ = 0;
};

}  // namespace purlin::cpu
