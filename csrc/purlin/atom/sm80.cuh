// The CUDA Atoms of sm_80 and later: 16-byte vectors over peer pointers.
//
// Together: all lanes of a block do everything in lockstep; for packets and direct calls, where latency counts or one message is all there is.
// Apart: a staging and a consuming role side by side, each of three kinds of warps, so that nobody who copies ever polls the link or fences:
//     watcher  polls words ahead of the copiers          -> go[k]:   what the k-th wait waits for has come
//     copiers  move the bytes                            -> done[k]: what the k-th notify publishes has been issued
//     notifier fences and stores the words, a peer a lane
// A gate of a ring is used again only when the other side has passed it (passed, told).
#pragma once
#include "../fault.hpp"
#include "lanes.cuh"

namespace purlin::gpu {

// Pinned host memory of a rank. The device writes it when a call fails; the host reads it at every call.
struct Page {
  Word abort;  // set by the host: slow waits give up
  Word poison;
  Word calls;  // the number of the call that failed
  Record record;
};

constexpr int warp = 32;

struct Setting {  // of one team of one rank in one call
  const Call* call;
  Page* page;
  unsigned long long timeout;  // nanoseconds
  int team;
};

// ---- failing

__device__ __forceinline__ Word* poison_of(const Call& c, int rank) {
  return Inbox{c.geometry, c.arena[rank]}.poison();
}

__device__ __noinline__ void tell_host(const Setting& s, Word poison) {
  ptx::store_relaxed(&s.page->calls, s.call->progress->calls);
  ptx::store_release(&s.page->poison, poison);
}
__device__ __noinline__ void fail(const Setting& s, Fault fault, int peer, Where where) {
  const Call& c = *s.call;
  Word poison = encode({fault, c.rank, c.rank_of(peer)});
  if (Word before = ptx::exchange(poison_of(c, c.rank), poison)) {
    poison = before;
  } else {
    s.page->record = {where, s.team, c.rank_of(peer)};
    __threadfence_system();
    for (int r = 0; r < c.ranks; ++r)
      if (r != c.rank) ptx::exchange(poison_of(c, r), poison);
  }
  tell_host(s, poison);
}

// ---- waiting, one lane: 256 polls, then the clock and the abort words every 256 polls

template <class F>
__device__ __forceinline__ bool slow_until(const Setting& s, F come, int peer, Where where) {
  const Call& c = *s.call;
  unsigned long long start = ptx::nanoseconds();
  for (;;) {
#pragma unroll 1
    for (int k = 0; k < 256; ++k)
      if (come()) return true;
    if (Word poison = ptx::load_relaxed(poison_of(c, c.rank))) return tell_host(s, poison), false;
    unsigned long long waited = ptx::nanoseconds() - start;
    if (waited > 1000000) {
      Word post = ptx::load_acquire(Inbox{c.geometry, c.own_arena()}.post(peer));
      if (elsewhere(post, c.progress->calls, c.signature) && !come())
        return fail(s, Fault::mismatch, peer, where), false;
      if (ptx::load_relaxed(&s.page->abort)) return fail(s, Fault::left, peer, where), false;
    }
    if (waited > s.timeout) return fail(s, Fault::stall, peer, where), false;
  }
}
template <class F>
__device__ __forceinline__ bool until(const Setting& s, F come, int peer, Where where) {
#pragma unroll 1
  for (int k = 0; k < 256; ++k)
    if (come()) return true;
  return slow_until(s, come, peer, where);
}
__device__ __forceinline__ bool reached(const Setting& s, Mark m, int peer, Where where) {
  return !m.word || until(s, [&] { return ptx::load_acquire(m.word) >= m.value; }, peer, where);
}
__device__ __forceinline__ bool granted_well(const Call& c, Mark m, int peer) {
  i64 place = static_cast<i64>(m.word[-1]);
  return place >= c.geometry.heap_at && place <= c.geometry.arena_bytes - c.pair[peer].reach;
}
__device__ __forceinline__ bool tagged(const Setting& s, Mark m, int peer, Where where) {
  if (!m.word) return true;
  Word found = 0;
  if (!until(s, [&] { return number_of(found = ptx::load_acquire(m.word)) == number_of(m.value); }, peer, where))
    return false;
  if (found != m.value) return fail(s, Fault::mismatch, peer, where), false;
  if (where.what == Where::What::grant && !granted_well(*s.call, m, peer))
    return fail(s, Fault::grant, peer, where), false;
  return true;
}

// ---- what both forms do alike: one lane a peer

template <class F>
__device__ __forceinline__ void store_marks(int n, F mark, int lane, void (*store)(Word*, Word)) {
  if (lane >= n) return;
  Mark m = mark(lane);
  if (m.word) store(m.word, m.value);
}
template <class F>
__device__ __forceinline__ void store_grants(int n, F line, int lane) {
  if (lane >= n) return;
  GrantMark m = line(lane);
  if (m.line) ptx::store_line(m.line, {m.value.place, m.value.tag});
}

// ---- packets

constexpr i64 payload_bytes = 8, line_bytes = 16;

__device__ __forceinline__ Word gather_payload(const Stretch& from, i64 at, i64 hi) {
  Word payload = 0;
  if (from.align() >= 8 && hi - at >= 8 && (from.flat() || from.box->align >= 8))
    return *reinterpret_cast<const Word*>(from.byte(at));
  for (i64 b = 0; b < smaller<i64>(8, hi - at); ++b)
    payload |= static_cast<Word>(*reinterpret_cast<const unsigned char*>(from.byte(at + b))) << (8 * b);
  return payload;
}
__device__ __forceinline__ void scatter_payload(const Stretch& to, i64 at, i64 hi, Word payload) {
  if (to.align() >= 8 && hi - at >= 8) {
    *reinterpret_cast<Word*>(to.byte(at)) = payload;
    return;
  }
  for (i64 b = 0; b < smaller<i64>(8, hi - at); ++b) *to.byte(at + b) = static_cast<char>(payload >> (8 * b));
}
__device__ __noinline__ void put_packet(const Packet& out, Lanes team) {
  for_each_item(out.place, out.place, out.range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch from = stretch(out.place, k, at);
    char* lines = out.window + (at + lo - out.range.lo) / payload_bytes * line_bytes;
    for (i64 b = team.lane * payload_bytes; b < hi - lo; b += team.lanes * payload_bytes)
      ptx::store_line(lines + b * (line_bytes / payload_bytes), {gather_payload(from, lo + b, hi), out.tag});
  });
}

struct Taken {
  bool came;
  Word payload;
};
__device__ __forceinline__ Taken take_line(const Setting& s, const char* line, Word tag, int peer, Where where) {
  ptx::Line got{};
  if (!until(s, [&] { return number_of((got = ptx::load_line(line)).tag) == number_of(tag); }, peer, where))
    return {false, 0};
  if (got.tag != tag) return fail(s, Fault::mismatch, peer, where), Taken{false, 0};
  return {true, got.payload};
}
__device__ __noinline__ bool take_packet(const Setting& s, const Packet& in, int peer, Where where, Lanes team) {
  bool came = true;
  for_each_item(in.place, in.place, in.range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch to = stretch(in.place, k, at);
    const char* lines = in.window + (at + lo - in.range.lo) / payload_bytes * line_bytes;
    for (i64 b = team.lane * payload_bytes; came && b < hi - lo; b += team.lanes * payload_bytes) {
      Taken taken = take_line(s, lines + b * (line_bytes / payload_bytes), in.tag, peer, where);
      came = taken.came;
      if (came) scatter_payload(to, lo + b, hi, taken.payload);
    }
  });
  return came;
}

struct Incoming {  // the packets of all contributions, in shared memory; no window: my own
  const char* window[max_ranks];
  Word tag[max_ranks];
};
template <class T>
__device__ __noinline__ bool take_reduce_as(const Setting& s, const Place& to, const Place& own, int n,
                                            const Incoming& in, int self, Range range, Op op, Where where, Lanes team) {
  bool came = true;
  for_each_item(to, own, range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch write = stretch(to, k, at), mine = stretch(own, k, at);
    i64 first = (at + lo - range.lo) / payload_bytes * line_bytes;
    for (i64 b = team.lane * payload_bytes; came && b < hi - lo; b += team.lanes * payload_bytes) {
      auto load = [&](int r) {
        if (r == self) return gather_payload(mine, lo + b, hi);
        Taken taken =
            take_line(s, in.window[r] + first + b * (line_bytes / payload_bytes), in.tag[r], s.call->peer_of(r), where);
        came &= taken.came;
        return taken.payload;
      };
      Word result = fold<T, Word>(op, n, load);
      if (came) scatter_payload(write, lo + b, hi, result);
    }
  });
  return came;
}

// ---- Together

class Together {
 public:
  __device__ Together(const Setting& setting, Incoming* incoming) : s_(setting), incoming_(incoming) {}

  __device__ int team() const { return s_.team; }
  __device__ int teams() const { return s_.call->teams; }
  __device__ bool enter() const { return true; }  // the kernel has looked
  __device__ void leave() const {}

  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    consume.open();
    stage.open();
    stage.step(0);
    consume.step(0);
    drain();
    stage.close();
    consume.close();
  }
  __device__ void copy(const Place& to, const Place& from, Range range) { gpu::copy(to, from, range, lanes()); }
  template <class F>
  __device__ void reduce(const Place&, const Place&, int, F, int, Range, Sum) {}  // rings only: Apart
  template <class F>
  __device__ void put(int n, F packet) {
    for (int p = 0; p < n; ++p) {
      Packet out = packet(p);
      if (out.window) put_packet(out, lanes());
    }
  }
  template <class F>
  __device__ Arrival take(int n, F packet, Where where) {
    bool came = true;
    for (int p = 0; came && p < n; ++p) {
      Packet in = packet(p);
      if (in.window) came = take_packet(s_, in, p, where, lanes());
    }
    return came ? Arrival::yes : Arrival::never;
  }
  template <class F>
  __device__ Arrival take_reduce(const Place& to, const Place& own, int n, F packet, int self, Sum sum, Where where) {
    if (lane() < n) {
      Packet in = packet(lane());
      incoming_->window[lane()] = in.window;
      incoming_->tag[lane()] = in.tag;
    }
    __syncthreads();
    Range all = packet(self).range;
    bool came = true;
    numeric::with_dtype(sum.dtype, [&](auto type) {
      came = take_reduce_as<decltype(type)>(s_, to, own, n, *incoming_, self, all, sum.op, where, lanes());
    });
    return came ? Arrival::yes : Arrival::never;
  }
  template <class F>
  __device__ void notify(int n, F mark) {
    __syncthreads();
    store_marks(n, mark, lane(), ptx::store_release);
  }
  // What nobody here waits for is told by the second warp, while the first waits for others.
  template <class F>
  __device__ void tell(int n, F mark) {
    if (lane() >= warp) store_marks(n, mark, lane() - warp, ptx::store_relaxed);
  }
  template <class F>
  __device__ void grant(int n, F line) {
    if (lane() >= warp) store_grants(n, line, lane() - warp);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    store_marks(n, mark, lane(), [](Word* word, Word value) { *word = value; });
  }
  template <class F>
  __device__ Arrival wait(int n, F mark, Where where) {
    bool bad = lane() < n && !reached(s_, mark(lane()), lane(), where);
    return __syncthreads_or(bad) ? Arrival::never : Arrival::yes;
  }
  template <class F>
  __device__ Arrival expect(int n, F mark, Where where) {
    bool bad = lane() < n && !tagged(s_, mark(lane()), lane(), where);
    return __syncthreads_or(bad) ? Arrival::never : Arrival::yes;
  }
  __device__ void meet() const { __syncthreads(); }
  __device__ void drain() const { __syncthreads(); }

 private:
  __device__ int lane() const { return static_cast<int>(threadIdx.x); }
  __device__ Lanes lanes() const { return {lane(), static_cast<int>(blockDim.x)}; }
  const Setting& s_;
  Incoming* incoming_;
};

// ---- Apart

constexpr int copiers = 256, role_threads = copiers + 2 * warp, gates = 8;

struct Crossing {  // of one role, in shared memory
  ptx::Gate go[gates], passed[gates], done[gates], told[gates];
  char* slots[2][max_ranks];
  int failed;

  __device__ void init() {
    for (int k = 0; k < gates; ++k) {
      ptx::gate_init(go + k, 1);
      ptx::gate_init(passed + k, copiers / warp);
      ptx::gate_init(done + k, copiers / warp);
      ptx::gate_init(told + k, 1);
    }
    failed = 0;
  }
};

class Apart {
 public:
  enum class Kind { copier, watcher, notifier };

  __device__ Apart(const Setting& setting, Crossing* crossings) : s_(setting) {
    int thread = static_cast<int>(threadIdx.x);
    role_ = thread / role_threads;
    int within = thread % role_threads;
    kind_ = within < copiers ? Kind::copier : within < copiers + warp ? Kind::watcher : Kind::notifier;
    lane_ = kind_ == Kind::copier ? within : within % warp;
    x_ = crossings + role_;
  }

  __device__ int team() const { return s_.team; }
  __device__ int teams() const { return s_.call->teams; }
  __device__ bool enter() const { return true; }
  __device__ void leave() const {}

  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    if (role_ == 0) {
      play(stage);
    } else {
      play(consume);
    }
  }
  __device__ void copy(const Place& to, const Place& from, Range range) {
    if (kind_ != Kind::copier) return;
    if (reduced_) ptx::barrier(copier_barrier(), copiers);  // other lanes may have written what this one reads
    reduced_ = false;
    gpu::copy(to, from, range, {lane_, copiers});
  }
  template <class F>
  __device__ void reduce(const Place& to, const Place& own, int n, F slot, int self, Range range, Sum sum) {
    if (kind_ != Kind::copier) return;
    char** slots = x_->slots[reductions_++ % 2];
    if (lane_ < n && lane_ != self) slots[lane_] = const_cast<char*>(slot(lane_));
    ptx::barrier(copier_barrier(), copiers);
    gpu::reduce(to, own, n, slots, self, range, sum, {lane_, copiers});
    reduced_ = true;
  }
  template <class F>
  __device__ void put(int, F) {}  // packets: Together
  template <class F>
  __device__ Arrival take(int, F, Where) {
    return Arrival::yes;
  }
  template <class F>
  __device__ Arrival take_reduce(const Place&, const Place&, int, F, int, Sum, Where) {
    return Arrival::yes;
  }
  template <class F>
  __device__ void notify(int n, F mark) {
    int k = notifies_++;
    if (kind_ == Kind::copier) {
      if (k >= gates && !passes(x_->told + k % gates, k / gates - 1)) return;
      __syncwarp();
      if (lane_ % warp == 0) ptx::gate_arrive(x_->done + k % gates);
    } else if (kind_ == Kind::notifier) {
      if (!passes(x_->done + k % gates, k / gates)) return;
      store_marks(n, mark, lane_, ptx::store_release);
      __syncwarp();
      if (lane_ == 0) ptx::gate_arrive(x_->told + k % gates);
    }
  }
  template <class F>
  __device__ void tell(int n, F mark) {
    if (kind_ == Kind::watcher) store_marks(n, mark, lane_, ptx::store_relaxed);
  }
  template <class F>
  __device__ void grant(int n, F line) {
    if (kind_ == Kind::watcher) store_grants(n, line, lane_);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    if (kind_ == Kind::watcher) store_marks(n, mark, lane_, [](Word* word, Word value) { *word = value; });
  }
  template <class F>
  __device__ Arrival wait(int n, F mark, Where where) {
    return come([&] { return lane_ >= n || reached(s_, mark(lane_), lane_, where); });
  }
  template <class F>
  __device__ Arrival expect(int n, F mark, Where where) {
    return come([&] { return lane_ >= n || tagged(s_, mark(lane_), lane_, where); });
  }
  __device__ void meet() const {}
  __device__ void drain() const { ptx::barrier(1 + role_, role_threads); }

 private:
  template <class R>
  __device__ void play(R& role) {
    role.open();
    int steps = role.steps();
    for (int i = 0; i < steps; ++i) role.step(i);
    drain();
    role.close();
  }
  template <class F>
  __device__ Arrival come(F arrived) {
    int k = waits_++;
    if (kind_ == Kind::watcher) return watch(k, arrived);
    if (kind_ == Kind::copier) {
      if (!passes(x_->go + k % gates, k / gates)) return Arrival::never;
      __syncwarp();
      if (lane_ % warp == 0) ptx::gate_arrive(x_->passed + k % gates);
    }
    return has_failed() ? Arrival::never : Arrival::yes;
  }
  template <class F>
  __device__ Arrival watch(int k, F arrived) {
    if (k >= gates && !passes(x_->passed + k % gates, k / gates - 1)) return Arrival::never;
    bool bad = __any_sync(0xffffffffu, !arrived());
    if (bad && lane_ == 0) *static_cast<volatile int*>(&x_->failed) = 1;
    __syncwarp();
    if (lane_ == 0 && !bad) ptx::gate_arrive(x_->go + k % gates);
    return bad ? Arrival::never : Arrival::yes;
  }
  // Wait for the phase-th completion of a gate; false when this role has failed meanwhile.
  __device__ bool passes(ptx::Gate* gate, int phase) const {
    while (!ptx::gate_passed(gate, static_cast<unsigned>(phase) & 1))
      if (has_failed()) return false;
    return true;
  }
  __device__ bool has_failed() const { return *static_cast<volatile const int*>(&x_->failed) != 0; }
  __device__ int copier_barrier() const { return 3 + role_; }

  const Setting& s_;
  Crossing* x_;
  Kind kind_;
  int role_, lane_;
  int waits_ = 0, notifies_ = 0, reductions_ = 0;
  bool reduced_ = false;
};

}  // namespace purlin::gpu
