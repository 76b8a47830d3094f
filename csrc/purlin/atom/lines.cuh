// Packets as lanes put and take them: a line holds payload and tag, so that one store is a message.
#pragma once
#include "fold.cuh"
#include "lanes.cuh"

namespace purlin::gpu {

constexpr int payload_bytes = 8, line_bytes = 16;  // wire bytes of packets are counted in 32 bits
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

}  // namespace purlin::gpu
