// Together: all lanes of a block in lockstep, for packets and direct calls: latency counts, or one message a peer is all there is.
#pragma once
#include "fold.cuh"
#include "lanes.cuh"

namespace purlin::gpu {

constexpr int payload_bytes = 8, line_bytes = 16;             // wire bytes of packets are counted in 32 bits
constexpr i64 little = i64{warp} * in_flight * vector_bytes;  // that a warp copies in one round
constexpr int lines_ahead = 4;  // of a packet that a lane reads before it may write, or looks at together

// ---- payloads: 8 bytes of a tensor, fewer at the end of a message

inline __device__ __noinline__ Word gather_odd(Stretch from, i64 at, i64 bytes) {
  Word payload = 0;
  if (from.flat()) {  // all bytes asked for before the first is used
    const unsigned char* first = reinterpret_cast<const unsigned char*>(from.first) + at;
    unsigned char held[payload_bytes];
#pragma unroll
    for (int b = 0; b < payload_bytes; ++b) held[b] = b < bytes ? first[b] : 0;
#pragma unroll
    for (int b = 0; b < payload_bytes; ++b) payload |= static_cast<Word>(held[b]) << (8 * b);
    return payload;
  }
#pragma unroll 1
  for (i64 b = 0; b < bytes; ++b)
    payload |= static_cast<Word>(*reinterpret_cast<const unsigned char*>(from.byte(at + b))) << (8 * b);
  return payload;
}
inline __device__ __noinline__ void scatter_odd(Stretch to, i64 at, i64 bytes, Word payload) {
#pragma unroll 1
  for (i64 b = 0; b < bytes; ++b) *to.byte(at + b) = static_cast<char>(payload >> (8 * b));
}
__device__ __forceinline__ Word gather(const Stretch& from, bool even, i64 at, i64 hi) {
  if (even && hi - at >= payload_bytes) return *reinterpret_cast<const Word*>(from.byte(at));
  return gather_odd(from, at, smaller<i64>(payload_bytes, hi - at));
}
__device__ __forceinline__ void scatter(const Stretch& to, bool even, i64 at, i64 hi, Word payload) {
  if (even && hi - at >= payload_bytes) {
    *reinterpret_cast<Word*>(to.byte(at)) = payload;
  } else {
    scatter_odd(to, at, smaller<i64>(payload_bytes, hi - at), payload);
  }
}

// ---- putting

__device__ __forceinline__ char* line_at(char* window, int byte) {
  return window + i64{byte} * (line_bytes / payload_bytes);
}

// What a lane holds of a flat packet while it waits for leave to send it.
struct Ahead {
  Word payload[lines_ahead];
};
__device__ __forceinline__ void read_ahead(Ahead& held, const Stretch& from, bool even, int bytes, Lanes team) {
#pragma unroll
  for (int u = 0; u < lines_ahead; ++u)
    if (int at = (team.lane + u * team.lanes) * payload_bytes; at < bytes)
      held.payload[u] = gather(from, even, at, bytes);
}
__device__ __forceinline__ void put_flat(const Ahead& held, const Stretch& from, bool even, int bytes, char* window,
                                         Word tag, Lanes team) {
#pragma unroll
  for (int u = 0; u < lines_ahead; ++u)
    if (int at = (team.lane + u * team.lanes) * payload_bytes; at < bytes)
      ptx::store_line(line_at(window, at), {held.payload[u], tag});
#pragma unroll 1
  for (int at = (team.lane + lines_ahead * team.lanes) * payload_bytes; at < bytes; at += team.lanes * payload_bytes)
    ptx::store_line(line_at(window, at), {gather(from, even, at, bytes), tag});
}
inline __device__ __noinline__ void put_boxes(const Bytes& out, Lines to, Lanes team) {
  for_each_item(out.place, out.place, out.range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch from = stretch(out.place, k, at);
    bool even = from.align() >= payload_bytes;
#pragma unroll 1
    for (int b = static_cast<int>(lo) + team.lane * payload_bytes; b < hi; b += team.lanes * payload_bytes)
      ptx::store_line(line_at(to.window, static_cast<int>(at - out.range.lo) + b), {gather(from, even, b, hi), to.tag});
  });
}

// ---- taking

// Lines of one message, looked at together until all have come.
__device__ __forceinline__ bool take_lines(const Launch& l, int team, ptx::Line* got, char* window, int at, int hi,
                                           int apart, Word tag, int peer, Where where) {
  auto due = [&](int u) { return at + u * apart < hi; };
  auto come = [&] {
    bool all = true;
#pragma unroll
    for (int u = 0; u < lines_ahead; ++u)
      if (due(u)) got[u] = ptx::load_line(line_at(window, at + u * apart));
#pragma unroll
    for (int u = 0; u < lines_ahead; ++u) all &= !due(u) || number_of(got[u].tag) == number_of(tag);
    return all;
  };
  if (!until(l, team, come, peer, where)) return false;
  bool agreed = true;
#pragma unroll
  for (int u = 0; u < lines_ahead; ++u) agreed &= !due(u) || got[u].tag == tag;
  if (!agreed) fail(l, team, Fault::mismatch, peer, where);
  return agreed;
}
// Wire bytes [lo, hi) of an item whose stretch is `to`; `window` is where the item's first byte would lie.
__device__ __forceinline__ bool take_stretch(const Launch& l, int team, const Stretch& to, int lo, int hi, char* window,
                                             Word tag, int peer, Where where, Lanes lanes) {
  bool even = to.align() >= payload_bytes;
  int apart = lanes.lanes * payload_bytes;
#pragma unroll 1
  for (int at = lo + lanes.lane * payload_bytes; at < hi; at += lines_ahead * apart) {
    ptx::Line got[lines_ahead];
    if (!take_lines(l, team, got, window, at, hi, apart, tag, peer, where)) return false;
#pragma unroll
    for (int u = 0; u < lines_ahead; ++u)
      if (at + u * apart < hi) scatter(to, even, at + u * apart, hi, got[u].payload);
  }
  return true;
}
inline __device__ __noinline__ bool take_boxes(const Launch& l, int team, const Packet& in, int peer, Where where,
                                               Lanes lanes) {
  bool came = true;
  for_each_item(in.place, in.place, in.range, [&](int k, i64 at, i64 lo, i64 hi) {
    char* window = line_at(in.window, static_cast<int>(at - in.range.lo));
    came = came && take_stretch(l, team, stretch(in.place, k, at), static_cast<int>(lo), static_cast<int>(hi), window,
                                in.tag, peer, where, lanes);
  });
  return came;
}

// ---- taking and adding: lines of all sources for the same place, looked at together, a few sources at a time

struct Incoming {  // by contribution, in shared memory; no window: my own
  char* window[max_ranks];
  Word tag[max_ranks];
};
// Wire bytes [lo, hi) of an item; a window holds the item's first byte `away` payload bytes after its own first.
template <class A>
__device__ __forceinline__ bool take_reduce_stretch(const Launch& l, int team, const Stretch& write,
                                                    const Stretch& mine, int lo, int hi, int away, int n,
                                                    const Incoming& in, int self, Op op, Where where, Lanes lanes) {
  bool even = write.align() >= payload_bytes, mine_even = mine.align() >= payload_bytes;
  auto peer_of = [&](int k) { return k > self ? k - self - 1 : k - self - 1 + n; };
#pragma unroll 1
  for (int b = lo + lanes.lane * payload_bytes; b < hi; b += lanes.lanes * payload_bytes) {
    Word own = gather(mine, mine_even, b, hi);
    Fold<typename A::T, A::extreme, Word> fold;
#pragma unroll 1
    for (int first = 0; first < n; first += lines_ahead) {
      ptx::Line got[lines_ahead];
      int late = first;
      auto due = [&](int u) { return first + u < n && first + u != self; };
      auto come = [&] {
        bool all = true;
#pragma unroll
        for (int u = 0; u < lines_ahead; ++u)
          if (due(u)) got[u] = ptx::load_line(line_at(in.window[first + u], away + b));
#pragma unroll
        for (int u = 0; u < lines_ahead; ++u)
          if (due(u) && number_of(got[u].tag) != number_of(in.tag[first + u])) all = false, late = first + u;
        return all;
      };
      Wait wait;
#pragma unroll 1
      while (!come())
        if (wait.hopeless(l, team, come, peer_of(late), where)) return false;
#pragma unroll
      for (int u = 0; u < lines_ahead; ++u) {
        if (first + u >= n) continue;
        if (due(u) && got[u].tag != in.tag[first + u])
          return fail(l, team, Fault::mismatch, peer_of(first + u), where), false;
        Word payload = due(u) ? got[u].payload : own;
        if (first + u == 0) {
          fold.first(payload);
        } else {
          fold.next(payload, op);
        }
      }
    }
    scatter(write, even, b, hi, fold.rounded(op, n));
  }
  return true;
}
// Of two ranks: the lines of the one message, several looked at together, each added to this rank's own payload.
template <class A>
__device__ __forceinline__ bool take_add(const Launch& l, int team, char* to, const char* own, int bytes,
                                         const Packet& in, bool mine_first, Op op, Where where, Lanes lanes) {
  Stretch write{nullptr, to}, mine{nullptr, const_cast<char*>(own)};
  bool even = write.align() >= payload_bytes, mine_even = mine.align() >= payload_bytes;
  int apart = lanes.lanes * payload_bytes;
#pragma unroll 1
  for (int at = lanes.lane * payload_bytes; at < bytes; at += lines_ahead * apart) {
    Word held[lines_ahead];
    ptx::Line got[lines_ahead];
#pragma unroll
    for (int u = 0; u < lines_ahead; ++u)
      if (at + u * apart < bytes) held[u] = gather(mine, mine_even, at + u * apart, bytes);
    if (!take_lines(l, team, got, in.window, at, bytes, apart, in.tag, 0, where)) return false;
#pragma unroll
    for (int u = 0; u < lines_ahead; ++u) {
      if (at + u * apart >= bytes) continue;
      Word sum = mine_first ? added<A>(held[u], got[u].payload, op) : added<A>(got[u].payload, held[u], op);
      scatter(write, even, at + u * apart, bytes, sum);
    }
  }
  return true;
}
template <class A>
__device__ __forceinline__ bool take_reduce_flat(const Launch& l, int team, char* to, const char* own, int bytes, int n,
                                                 const Incoming& in, int self, Op op, Where where, Lanes lanes) {
  Stretch write{nullptr, to}, mine{nullptr, const_cast<char*>(own)};
  return take_reduce_stretch<A>(l, team, write, mine, 0, bytes, 0, n, in, self, op, where, lanes);
}
template <class A>
__device__ __noinline__ bool take_reduce_boxes(const Launch& l, int team, const Place& to, const Place& own, int n,
                                               const Incoming& in, int self, Range range, Op op, Where where,
                                               Lanes lanes) {
  bool came = true;
  for_each_item(to, own, range, [&](int k, i64 at, i64 lo, i64 hi) {
    came = came &&
           take_reduce_stretch<A>(l, team, stretch(to, k, at), stretch(own, k, at), static_cast<int>(lo),
                                  static_cast<int>(hi), static_cast<int>(at - range.lo), n, in, self, op, where, lanes);
  });
  return came;
}
template <class A>
__device__ __forceinline__ bool take_reduce(const Launch& l, int team, const Place& to, const Place& own, int n,
                                            const Incoming& in, int self, Range range, Op op, Where where,
                                            Lanes lanes) {
  if (to.flat() && own.flat())
    return take_reduce_flat<A>(l, team, to.first + range.lo, own.first + range.lo,
                               static_cast<int>(range.hi - range.lo), n, in, self, op, where, lanes);
  return take_reduce_boxes<A>(l, team, to, own, n, in, self, range, op, where, lanes);
}

// ---- the Atom

template <Use use, bool all_flat, class Adding = Copies>  // of its calls: packets or direct
class Together {
 public:
  static constexpr bool flat = all_flat;

  __device__ Together(const Launch& launch, int team, Incoming* incoming)
      : l_(launch), team_(team), incoming_(incoming) {}

  __device__ int team() const { return team_; }
  __device__ int teams() const { return l_.call.teams; }
  // All that memory knows is asked for at once, and waited for where it is used. So a dead communicator is noticed where lanes first come together.
  __device__ bool enter() {
    const Call& c = l_.call;
    if (lane() == static_cast<int>(blockDim.x) - 1) poison_ = ptx::load_relaxed(poison_of(c, c.rank));
    if (int p = share().peer; p < c.peers()) served_ = load(p);
    if (int p = lane() % warp; p < c.peers()) looked_ = load(p);
    return true;
  }
  __device__ void leave() const {
    if (lane() == 0 && team_ == 0) atomicAdd(&l_.call.progress->calls, Word{1});  // nobody waits for it
  }
  // Asked by lane p of a warp for peer p, and by the lanes that serve the peer.
  __device__ Word sent(Use, int peer) const { return either(peer, looked_.sent, served_.sent); }
  __device__ Word taken(Use, int peer) const { return either(peer, looked_.taken, served_.taken); }

  // What a call counts is read by the next one alone: it is kept, by a warp that has little else to do, while others wait.
  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    consume.open();
    stage.open();
    stage.step(0);
    if constexpr (use == Use::packet) consume.step(0);
    stage.close();
    consume.close();
    if constexpr (use != Use::packet) consume.step(0);
  }
  template <class G, class C, class S>
  __device__ void three(int, G, C, S) {}  // rings only
  // What is little is copied by one warp that has nothing else to do, and all others pass by; else from the last lane on, for the first take packets.
  __device__ void copy(const Place& to, const Place& from, Range range) {
    int all = static_cast<int>(blockDim.x);
    Lanes who{all - 1 - lane(), all};
    if (use == Use::packet && range.hi - range.lo <= little) who = {lane() - from_last(3), warp};
    if (who.lane >= 0 && who.lane < who.lanes) gpu::copy(to, from, range, who);
  }
  template <class T, class F>
  __device__ void reduce(int, T, const Place&, int, F, int, Range, Sum) {}  // rings, and Borrow

  // Peers share the warps: a lane serves one peer, all peers are served at once.
  template <class C, class F, class G>
  __device__ Arrival put(int n, C credit, F source, G window, Where where) {
    int judge = lane() - from_last(1);  // of the warp that has the least to read
    bool judges = judge >= 0 && judge < n;
    Mark due = judges ? credit(ptx::here(judge)) : Mark{};
    Word paid = due.word ? ptx::load_acquire(due.word) : 0;
    Share mine = share();
    Bytes out = mine.peer < n ? source(ptx::here(mine.peer)) : Bytes{};
    int bytes = static_cast<int>(out.range.hi - out.range.lo);
    Stretch from{nullptr, out.place.first + out.range.lo};
    bool one = flat || out.place.flat(), even = (bits(from.first) & (payload_bytes - 1)) == 0;
    Ahead held;
    if (one) read_ahead(held, from, even, bytes, mine.lanes);
    bool bad = due.word && paid < due.value && !reached(l_, team_, due, judge, where);
    if (verdict(bad) != Arrival::yes) return Arrival::never;
    if (bytes <= 0) return Arrival::yes;
    Lines to = window(mine.peer);
    if (one) {
      put_flat(held, from, even, bytes, to.window, to.tag, mine.lanes);
    } else {
      put_boxes(out, to, mine.lanes);
    }
    return Arrival::yes;
  }
  template <class F>
  __device__ Arrival take(int n, F packet, Where where) {
    Share mine = share();
    if (mine.peer >= n) return Arrival::yes;
    Packet in = packet(mine.peer);
    if (in.range.empty()) return Arrival::yes;
    bool came;
    if (flat || in.place.flat()) {
      Stretch to{nullptr, in.place.first + in.range.lo};
      came = take_stretch(l_, team_, to, 0, static_cast<int>(in.range.hi - in.range.lo), in.window, in.tag, mine.peer,
                          where, mine.lanes);
    } else {
      came = take_boxes(l_, team_, in, mine.peer, where, mine.lanes);
    }
    return came ? Arrival::yes : Arrival::never;
  }
  template <class F>
  __device__ Arrival take_reduce(const Place& to, const Place& own, int n, F packet, int self, Sum sum, Where where) {
    if (n == 2 && (flat || (to.flat() && own.flat()))) return take_add(to, own, packet, self, sum, where);
    if (lane() < n - 1) {
      int k = l_.call.rank_of(lane());
      Packet in = packet(k);
      incoming_->window[k] = in.window;
      incoming_->tag[k] = in.tag;
    }
    __syncthreads();
    Range all = packet(self).range;
    bool came = true;
    with_adds<Adding>(sum, [&](auto adds) {
      came = gpu::take_reduce<decltype(adds)>(l_, team_, to, own, n, *incoming_, self, all, sum.op, where, lanes());
    });
    return came ? Arrival::yes : Arrival::never;
  }
  template <class F>
  __device__ void notify(int n, F mark) {
    __syncthreads();
    store_marks(n, mark, lane(), ptx::store_release);
  }
  template <class F>
  __device__ void lend(int n, F line) {
    __syncthreads();
    store_grants(n, line, lane(), ptx::store_line_release);
  }
  // What nobody here waits for is told by the second warp, while the first waits for others.
  template <class F>
  __device__ void tell(int n, F mark) {
    store_marks(n, mark, lane() - warp, ptx::store_relaxed);
  }
  template <class F>
  __device__ void grant(int n, F line) {
    store_grants(n, line, lane() - warp, ptx::store_line);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    store_marks(n, mark, lane() - from_last(2), keep_word);
  }
  template <class F>
  __device__ Arrival wait(int n, F mark, Where where) {
    return verdict(lane() < n && !reached(l_, team_, mark(ptx::here(lane())), lane(), where));
  }
  template <class F>
  __device__ Arrival expect(int n, F mark, Where where) {
    return verdict(lane() < n && !tagged(l_, team_, mark(ptx::here(lane())), lane(), where));
  }
  // Both roles ask for it, at the same place: once is enough.
  __device__ void meet() {
    if (met_) __syncthreads();
    met_ = !met_;
  }
  __device__ void drain() const {}  // each step ends by itself

 private:
  template <class F>
  __device__ Arrival take_add(const Place& to, const Place& own, F packet, int self, Sum sum, Where where) {
    Packet in = packet(1 - self);
    Range all = packet(self).range;
    bool came = true;
    with_adds<Adding>(sum, [&](auto adds) {
      came = gpu::take_add<decltype(adds)>(l_, team_, to.first + all.lo, own.first + all.lo,
                                           static_cast<int>(all.hi - all.lo), in, self == 0, sum.op, where, lanes());
    });
    return came ? Arrival::yes : Arrival::never;
  }
  struct Pair {
    Word sent, taken;
  };
  // By value: a choice between two places would put both in memory.
  __device__ Word either(int peer, Word looked, Word served) const { return peer == lane() % warp ? looked : served; }
  __device__ Pair load(int peer) const {
    Counts& count = l_.call.count(peer, team_);
    return {*count.sent_on(use), *count.taken_on(use)};
  }
  struct Share {  // the peer that this lane serves, and with whom; none when there are fewer peers than that
    int peer;
    Lanes lanes;
  };
  __device__ Share share() const {
    int each = static_cast<int>(l_.share.divisor) * warp;
    int peer = static_cast<int>(l_.share.divide(static_cast<unsigned>(lane()) / warp));
    return {peer, {lane() - peer * each, each}};
  }
  __device__ Arrival verdict(bool bad) {
    if (poison_ != 0) tell_host(l_, poison_), bad = true;
    return __syncthreads_or(bad) ? Arrival::never : Arrival::yes;
  }
  __device__ int lane() const { return static_cast<int>(threadIdx.x); }
  // The first lane of a warp, the last one being the first from there.
  __device__ static int from_last(int warps) { return static_cast<int>(blockDim.x) - warps * warp; }
  __device__ Lanes lanes() const { return {lane(), static_cast<int>(blockDim.x)}; }

  const Launch& l_;
  int team_;
  Incoming* incoming_;
  Word poison_ = 0;
  bool met_ = false;
  Pair served_{}, looked_{};
};

}  // namespace purlin::gpu
