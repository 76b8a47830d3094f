// Packets: a line holds payload and tag, so that one store is a message. Half of a block stages and half consumes, side by side: at these sizes latency is
// made of what each lane looks up on its way, and so whoever waits for a packet has all of it at hand before the packet comes.
#pragma once
#include "fold.cuh"
#include "lanes.cuh"

namespace purlin::gpu {

constexpr int payload_bytes = 8, line_bytes = 16;             // wire bytes of packets are counted in 32 bits
constexpr i64 little = i64{warp} * in_flight * vector_bytes;  // that a warp copies in one round
constexpr int crew = block_threads / 2;                       // lanes of a role
// Lines of a packet that a lane reads before it may write, or looks at together, or of as many sources; more of them were slower. What needs one line a lane
// has code of its own: at these sizes each instruction counts.
constexpr int lines_ahead = 4;

// ---- payloads: 8 bytes of a tensor, fewer at the end of a message

// U: the largest unit that lies evenly. All are asked for before the first is used.
template <class U>
__device__ __forceinline__ Word gather_units(const char* first, int bytes) {
  constexpr int size = sizeof(U), units = payload_bytes / size;
  U held[units];
#pragma unroll
  for (int u = 0; u < units; ++u) held[u] = u * size < bytes ? reinterpret_cast<const U*>(first)[u] : U{0};
  Word payload = 0;
#pragma unroll
  for (int u = 0; u < units; ++u) payload |= static_cast<Word>(held[u]) << (8 * size * u);
  return payload;
}
template <class U>
__device__ __forceinline__ void scatter_units(char* first, int bytes, Word payload) {
  constexpr int size = sizeof(U);
#pragma unroll
  for (int u = 0; u < payload_bytes / size; ++u)
    if (u * size < bytes) reinterpret_cast<U*>(first)[u] = static_cast<U>(payload >> (8 * size * u));
}
__device__ __forceinline__ bool in_halves(const char* first, int bytes) {
  return ((bits(first) | static_cast<unsigned>(bytes)) & 1) == 0;
}
inline __device__ __noinline__ Word gather_odd(Stretch from, i64 at, int bytes) {
  if (from.flat()) {
    const char* first = from.first + at;
    return in_halves(first, bytes) ? gather_units<std::uint16_t>(first, bytes)
                                   : gather_units<std::uint8_t>(first, bytes);
  }
  Word payload = 0;
#pragma unroll 1
  for (int b = 0; b < bytes; ++b)
    payload |= static_cast<Word>(*reinterpret_cast<const unsigned char*>(from.byte(at + b))) << (8 * b);
  return payload;
}
inline __device__ __noinline__ void scatter_odd(Stretch to, i64 at, int bytes, Word payload) {
  if (to.flat()) {
    char* first = to.first + at;
    return in_halves(first, bytes) ? scatter_units<std::uint16_t>(first, bytes, payload)
                                   : scatter_units<std::uint8_t>(first, bytes, payload);
  }
#pragma unroll 1
  for (int b = 0; b < bytes; ++b) *to.byte(at + b) = static_cast<char>(payload >> (8 * b));
}
__device__ __forceinline__ Word gather(const Stretch& from, bool even, i64 at, i64 hi) {
  if (even && hi - at >= payload_bytes) return *reinterpret_cast<const Word*>(from.byte(at));
  return gather_odd(from, at, static_cast<int>(smaller<i64>(payload_bytes, hi - at)));
}
__device__ __forceinline__ void scatter(const Stretch& to, bool even, i64 at, i64 hi, Word payload) {
  if (even && hi - at >= payload_bytes) {
    *reinterpret_cast<Word*>(to.byte(at)) = payload;
  } else {
    scatter_odd(to, at, static_cast<int>(smaller<i64>(payload_bytes, hi - at)), payload);
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
// f(u, at) for each line that it holds.
template <class F>
__device__ __forceinline__ void for_each_ahead(int bytes, Lanes team, F f) {
  int at = team.lane * payload_bytes, apart = team.lanes * payload_bytes;
  if (at < bytes) f(0, at);
  if (bytes <= apart) return;
#pragma unroll
  for (int u = 1; u < lines_ahead; ++u)
    if (at + u * apart < bytes) f(u, at + u * apart);
}
__device__ __forceinline__ void read_ahead(Ahead& held, const Stretch& from, bool even, int bytes, Lanes team) {
  for_each_ahead(bytes, team, [&](int u, int at) { held.payload[u] = gather(from, even, at, bytes); });
}
__device__ __forceinline__ void put_flat(const Ahead& held, const Stretch& from, bool even, int bytes, const Lines& to,
                                         Lanes team) {
  for_each_ahead(bytes, team,
                 [&](int u, int at) { ptx::store_line(line_at(to.window, at), {held.payload[u], to.tag}); });
#pragma unroll 1
  for (int at = (team.lane + lines_ahead * team.lanes) * payload_bytes; at < bytes; at += team.lanes * payload_bytes)
    ptx::store_line(line_at(to.window, at), {gather(from, even, at, bytes), to.tag});
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
template <int lines>
__device__ __forceinline__ bool take_lines(const Launch& l, int team, ptx::Line (&got)[lines], char* window, int at,
                                           int hi, int apart, Word tag, int peer, Where where) {
  auto due = [&](int u) { return at + u * apart < hi; };
  auto come = [&] {
    bool all = true;
#pragma unroll
    for (int u = 0; u < lines; ++u)
      if (due(u)) got[u] = ptx::load_line(line_at(window, at + u * apart));
#pragma unroll
    for (int u = 0; u < lines; ++u) all &= !due(u) || number_of(got[u].tag) == number_of(tag);
    return all;
  };
  if (!until(l, team, come, peer, where)) return false;
  bool agreed = true;
#pragma unroll
  for (int u = 0; u < lines; ++u) agreed &= !due(u) || got[u].tag == tag;
  if (!agreed) fail(l, team, Fault::mismatch, peer, where);
  return agreed;
}
template <int lines>
__device__ __forceinline__ bool take_rounds(const Launch& l, int team, const Stretch& to, int lo, int hi, char* window,
                                            Word tag, int peer, Where where, Lanes lanes) {
  bool even = to.align() >= payload_bytes;
  int apart = lanes.lanes * payload_bytes;
#pragma unroll 1
  for (int at = lo + lanes.lane * payload_bytes; at < hi; at += lines * apart) {
    ptx::Line got[lines];
    if (!take_lines(l, team, got, window, at, hi, apart, tag, peer, where)) return false;
#pragma unroll
    for (int u = 0; u < lines; ++u)
      if (at + u * apart < hi) scatter(to, even, at + u * apart, hi, got[u].payload);
  }
  return true;
}
// Wire bytes [lo, hi) of an item whose stretch is `to`; `window` is where the item's first byte would lie.
__device__ __forceinline__ bool take_stretch(const Launch& l, int team, const Stretch& to, int lo, int hi, char* window,
                                             Word tag, int peer, Where where, Lanes lanes) {
  if (hi - lo <= lanes.lanes * payload_bytes)
    return take_rounds<1>(l, team, to, lo, hi, window, tag, peer, where, lanes);
  return take_rounds<lines_ahead>(l, team, to, lo, hi, window, tag, peer, where, lanes);
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
template <class A, int lines>
__device__ __forceinline__ bool take_add_rounds(const Launch& l, int team, char* to, const char* own, int bytes,
                                                const Packet& in, bool mine_first, Op op, Where where, Lanes lanes) {
  Stretch write{nullptr, to}, mine{nullptr, const_cast<char*>(own)};
  bool even = write.align() >= payload_bytes, mine_even = mine.align() >= payload_bytes;
  int apart = lanes.lanes * payload_bytes;
#pragma unroll 1
  for (int at = lanes.lane * payload_bytes; at < bytes; at += lines * apart) {
    Word held[lines];
    ptx::Line got[lines];
#pragma unroll
    for (int u = 0; u < lines; ++u)
      if (at + u * apart < bytes) held[u] = gather(mine, mine_even, at + u * apart, bytes);
    if (!take_lines(l, team, got, in.window, at, bytes, apart, in.tag, 0, where)) return false;
#pragma unroll
    for (int u = 0; u < lines; ++u) {
      if (at + u * apart >= bytes) continue;
      Word sum = mine_first ? added<A>(held[u], got[u].payload, op) : added<A>(got[u].payload, held[u], op);
      scatter(write, even, at + u * apart, bytes, sum);
    }
  }
  return true;
}
template <class A>
__device__ __forceinline__ bool take_add(const Launch& l, int team, char* to, const char* own, int bytes,
                                         const Packet& in, bool mine_first, Op op, Where where, Lanes lanes) {
  if (bytes <= lanes.lanes * payload_bytes)
    return take_add_rounds<A, 1>(l, team, to, own, bytes, in, mine_first, op, where, lanes);
  return take_add_rounds<A, lines_ahead>(l, team, to, own, bytes, in, mine_first, op, where, lanes);
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

template <bool all_flat, class Adding = Copies>
class Packets {
 public:
  static constexpr bool flat = all_flat;

  __device__ Packets(const Launch& launch, int team, Incoming* incoming)
      : l_(launch),
        team_(team),
        incoming_(incoming),
        consumes_(threadIdx.x < crew),
        lane_(static_cast<int>(threadIdx.x) % crew) {}

  __device__ int team() const { return team_; }
  __device__ int teams() const { return l_.call.teams; }
  // All that memory knows is asked for at once, and waited for where it is used: a dead communicator is noticed behind that.
  __device__ bool enter() {
    const Call& c = l_.call;
    poison_ = ptx::load_relaxed(poison_of(c, c.rank));
    if (int p = share().peer; p < c.peers()) served_ = load(p);
    if (int p = lane_ % warp; p < c.peers()) looked_ = load(p);
    return true;
  }
  // By the warp that has told of this call's number.
  __device__ void leave() const {
    __syncwarp();
    if (consumes_ && lane_ == warp && team_ == 0) atomicAdd(&l_.call.progress->calls, Word{1});  // nobody waits for it
  }
  // Asked by lane p of a warp for peer p, and by the lanes that serve the peer; each role for what it counts.
  __device__ Word sent(Use, int peer) const { return either(peer); }
  __device__ Word taken(Use, int peer) const { return either(peer); }

  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    if (consumes_) {
      play(consume);
      if (awaits_) come_together();
    } else {
      play(stage);
    }
  }
  // What is little is copied by one warp that has nothing else to do, and all others pass by.
  __device__ void copy(const Place& to, const Place& from, Range range) {
    Lanes who{crew - 1 - lane_, crew};
    if (range.hi - range.lo <= little) who = {lane_ - from_last(3), warp};
    if (who.lane >= 0 && who.lane < who.lanes) gpu::copy(to, from, range, who);
  }

  // Peers share the lanes: a lane serves one peer, all peers are served at once.
  template <class C, class F, class G>
  __device__ Arrival put(int n, C credit, F source, G window, Where where) {
    int judge = lane_ - from_last(1);  // of the warp that has the least to read
    bool judges = judge >= 0 && judge < n;
    Mark due = judges ? credit(ptx::here(judge)) : Mark{};
    Word paid = due.word ? ptx::load_acquire(due.word) : 0;
    Share mine = share();
    Bytes out = mine.peer < n ? source(ptx::here(mine.peer)) : Bytes{};
    Lines to = mine.peer < n ? window(ptx::here(mine.peer)) : Lines{};
    int bytes = static_cast<int>(out.range.hi - out.range.lo);
    Stretch from{nullptr, out.place.first + out.range.lo};
    bool one = flat || out.place.flat(), even = (bits(from.first) & (payload_bytes - 1)) == 0;
    Ahead held;
    if (one) read_ahead(held, from, even, bytes, mine.lanes);
    bool bad = due.word && paid < due.value && !reached(l_, team_, due, judge, where);
    if (ptx::barrier_or(stages_alone, crew, bad || is_dead())) return Arrival::never;
    if (bytes <= 0) return Arrival::yes;
    if (one) {
      put_flat(held, from, even, bytes, to, mine.lanes);
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
    if (is_dead()) return Arrival::never;
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
    bool two = n == 2 && (flat || (to.flat() && own.flat()));
    Packet in = two ? packet(1 - self) : Packet{};
    if (!two && lane_ < n - 1) {
      int k = l_.call.rank_of(lane_);
      Packet each = packet(k);
      incoming_->window[k] = each.window;
      incoming_->tag[k] = each.tag;
    }
    Range all = packet(self).range;
    come_together();
    if (is_dead()) return Arrival::never;
    bool came = true;
    with_adds<Adding>(sum, [&](auto adds) {
      using Adds = decltype(adds);
      came = two ? take_add<Adds>(l_, team_, to.first + all.lo, own.first + all.lo, static_cast<int>(all.hi - all.lo),
                                  in, self == 0, sum.op, where, {lane_, crew})
                 : gpu::take_reduce<Adds>(l_, team_, to, own, n, *incoming_, self, all, sum.op, where, {lane_, crew});
    });
    return came ? Arrival::yes : Arrival::never;
  }
  // What nobody here waits for is told by the second warp, while the first waits for others.
  template <class F>
  __device__ void tell(int n, F mark) {
    store_marks(n, mark, lane_ - warp, ptx::store_relaxed);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    store_marks(n, mark, lane_ - from_last(2), keep_word);
  }
  // Whoever stages goes on; whoever consumes comes to it where it is about to write.
  __device__ void meet() {
    if (consumes_) {
      awaits_ = true;
    } else {
      ptx::barrier_arrive(both_roles, block_threads);
    }
  }
  __device__ void drain() const {}  // each step ends by itself

  // Rings and direct calls: other Atoms.
  template <class G, class C, class S>
  __device__ void three(int, G, C, S) {}
  template <class T, class F>
  __device__ void reduce(int, T, const Place&, int, F, int, Range, Sum) {}
  template <class F>
  __device__ void notify(int, F) {}
  template <class F>
  __device__ void lend(int, F) {}
  template <class F>
  __device__ void grant(int, F) {}
  template <class F>
  __device__ Arrival wait(int, F, Where) {
    return Arrival::yes;
  }
  template <class F>
  __device__ Arrival expect(int, F, Where) {
    return Arrival::yes;
  }

 private:
  enum Barrier { stages_alone = 1, both_roles };

  // By value: a choice between two places would put both in memory.
  __device__ Word either(int peer) const { return peer == lane_ % warp ? looked_ : served_; }
  __device__ Word load(int peer) const {
    Counts& count = l_.call.count(peer, team_);
    return consumes_ ? *count.taken_on(Use::packet) : *count.sent_on(Use::packet);
  }
  struct Share {  // the peer that this lane serves, and with whom; none when there are fewer peers than that
    int peer;
    Lanes lanes;
  };
  __device__ Share share() const {
    int each = static_cast<int>(l_.share.divisor),
        peer = static_cast<int>(l_.share.divide(static_cast<unsigned>(lane_)));
    return {peer, {lane_ - peer * each, each}};
  }
  __device__ bool is_dead() const {
    if (poison_ != 0) tell_host(l_, poison_);
    return poison_ != 0;
  }
  __device__ void come_together() {
    awaits_ = false;
    ptx::barrier(both_roles, block_threads);
  }
  // The first lane of a warp of this crew, the last one being the first from there.
  __device__ static int from_last(int warps) { return crew - warps * warp; }

  const Launch& l_;
  int team_;
  Incoming* incoming_;
  bool consumes_;
  int lane_;
  Word poison_ = 0;
  bool awaits_ = false;
  Word served_ = 0, looked_ = 0;
};

}  // namespace purlin::gpu
