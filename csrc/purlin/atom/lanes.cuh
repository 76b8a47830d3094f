// Bytes moved by many lanes at once: copies, packets and reductions over Places, 16 bytes a lane wherever both sides allow it.
#pragma once
#include "../numeric.hpp"
#include "ptx.cuh"

namespace purlin::gpu {

struct Lanes {  // who works together: lane `lane` of `lanes`
  int lane, lanes;
};

// ---- where bytes lie

// One item of a Place, or a stretch of a slot: address of a byte counted from the item's first.
struct Stretch {
  const Box* box;  // nullptr: the bytes lie one after the other
  char* first;

  __device__ __forceinline__ bool flat() const { return box == nullptr; }
  __device__ __forceinline__ bool aligned() const {
    return (reinterpret_cast<unsigned long long>(first) & 15) == 0 &&
           (flat() || (box->align == vector_bytes && box->run >> 35 == 0));
  }
  __device__ __forceinline__ int align() const {
    i64 all = static_cast<i64>(reinterpret_cast<unsigned long long>(first)) | (flat() ? vector_bytes : box->align);
    return static_cast<int>(all & -all);
  }
  __device__ __forceinline__ char* vector(unsigned v) const {  // aligned() only
    if (flat()) return first + static_cast<i64>(v) * vector_bytes;
    unsigned row = box->by_run.divide(v);
    i64 offset = static_cast<i64>(v - row * box->by_run.divisor) * vector_bytes;
    for (int d = box->dims - 1; d >= 0; --d) {
      unsigned outer = box->by_extent[d].divide(row);
      offset += static_cast<i64>(row - outer * box->by_extent[d].divisor) * box->stride[d];
      row = outer;
    }
    return first + offset;
  }
  __device__ __forceinline__ char* byte(i64 at) const {
    if (flat()) return first + at;
    i64 row = at / box->run, offset = at % box->run;
    for (int d = box->dims - 1; d >= 0; --d) {
      offset += row % box->extent[d] * box->stride[d];
      row /= box->extent[d];
    }
    return first + offset;
  }
};

__device__ __forceinline__ Stretch stretch(const Place& place, int item, i64 at) {
  if (place.slot) return {nullptr, place.slot + (at - place.origin)};
  const Box& box = place.items[item].box;
  return {box.dims ? &box : nullptr, place.base(box.tensor) + box.offset};
}

// Calls f(item, lo, hi) for each item of the places that `range` touches; lo and hi count from the item's first byte. Sides with items have the same ones.
template <class F>
__device__ __forceinline__ void for_each_item(const Place& a, const Place& b, Range range, F f) {
  const Item* items = a.items ? a.items : b.items;
  int count = a.items ? a.count : b.count;
  for (int k = 0; k < count; ++k) {
    i64 at = items[k].at, lo = larger(range.lo, at), hi = smaller(range.hi, at + items[k].bytes);
    if (lo < hi) f(k, at, lo - at, hi - at);
  }
}

// ---- copies

template <class V>
__device__ __forceinline__ void copy_units(Stretch to, Stretch from, i64 lo, i64 hi, Lanes team) {
  for (i64 at = lo + team.lane * static_cast<i64>(sizeof(V)); at < hi; at += team.lanes * static_cast<i64>(sizeof(V)))
    *reinterpret_cast<V*>(to.byte(at)) = *reinterpret_cast<const V*>(from.byte(at));
}

template <int unroll>
__device__ __forceinline__ void copy_vectors(Stretch to, Stretch from, unsigned lo, unsigned hi, Lanes team) {
  unsigned step = static_cast<unsigned>(team.lanes), v = lo + static_cast<unsigned>(team.lane);
  for (; v + (unroll - 1) * step < hi; v += unroll * step) {
    uint4 held[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u)
      held[u] = *reinterpret_cast<const uint4*>(from.vector(v + static_cast<unsigned>(u) * step));
#pragma unroll
    for (int u = 0; u < unroll; ++u)
      *reinterpret_cast<uint4*>(to.vector(v + static_cast<unsigned>(u) * step)) = held[u];
  }
  for (; v < hi; v += step) *reinterpret_cast<uint4*>(to.vector(v)) = *reinterpret_cast<const uint4*>(from.vector(v));
}

// Both sides lie together: vectors, then the tail a byte a lane.
__device__ __forceinline__ void copy_flat(char* to, const char* from, i64 bytes, Lanes team) {
  i64 n = bytes / vector_bytes, v = team.lane, step = team.lanes;
  uint4* write = reinterpret_cast<uint4*>(to);
  const uint4* read = reinterpret_cast<const uint4*>(from);
  for (; v + 7 * step < n; v += 8 * step) {
    uint4 held[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) held[u] = read[v + u * step];
#pragma unroll
    for (int u = 0; u < 8; ++u) write[v + u * step] = held[u];
  }
  if (v + 3 * step < n) {
    uint4 held[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) held[u] = read[v + u * step];
#pragma unroll
    for (int u = 0; u < 4; ++u) write[v + u * step] = held[u];
    v += 4 * step;
  }
  for (; v < n; v += step) write[v] = read[v];
  for (i64 at = n * vector_bytes + team.lane; at < bytes; at += step) to[at] = from[at];
}

__device__ __noinline__ void copy_stretch(Stretch to, Stretch from, i64 lo, i64 hi, Lanes team) {
  if (to.flat() && from.flat()) {
    char* write = to.first + lo;
    const char* read = from.first + lo;
    if (write == read) return;
    if (((reinterpret_cast<unsigned long long>(write) | reinterpret_cast<unsigned long long>(read)) & 15) == 0)
      return copy_flat(write, read, hi - lo, team);
  } else if (to.aligned() && from.aligned() && hi >> 35 == 0) {
    return copy_vectors<4>(to, from, static_cast<unsigned>(lo / vector_bytes), static_cast<unsigned>(hi / vector_bytes),
                           team);
  }
  switch (smaller(to.align(), from.align())) {
    case 8:
      return copy_units<uint2>(to, from, lo, hi & ~i64{7}, team), copy_units<char>(to, from, hi & ~i64{7}, hi, team);
    case 4:
      return copy_units<unsigned>(to, from, lo, hi & ~i64{3}, team), copy_units<char>(to, from, hi & ~i64{3}, hi, team);
    case 2:
      return copy_units<unsigned short>(to, from, lo, hi & ~i64{1}, team),
             copy_units<char>(to, from, hi & ~i64{1}, hi, team);
    default: return copy_units<char>(to, from, lo, hi, team);
  }
}

__device__ __noinline__ void copy(const Place& to, const Place& from, Range range, Lanes team) {
  for_each_item(to, from, range, [&](int k, i64 at, i64 lo, i64 hi) {
    copy_stretch(stretch(to, k, at), stretch(from, k, at), lo, hi, team);
  });
}

// ---- reductions: contributions in rank order, wide, rounded once

// Sums (and averages: a sum, divided once) and extremes are the two loops; telling max from min is a select, so that fewer of them are compiled.
template <class T, bool extreme, class V, class F>
__device__ __forceinline__ V fold(Op op, int n, F load) {
  using Stored = typename T::Stored;
  using Wide = typename T::Wide;
  constexpr int elements = sizeof(V) / sizeof(Stored);
  union {
    V all;
    Stored one[elements];
  } in;
  Wide wide[elements];
  in.all = load(0);
#pragma unroll
  for (int e = 0; e < elements; ++e) wide[e] = T::widen(in.one[e]);
#pragma unroll 1
  for (int k = 1; k < n; ++k) {
    in.all = load(k);
#pragma unroll
    for (int e = 0; e < elements; ++e) {
      Wide next = T::widen(in.one[e]);
      if constexpr (extreme) {
        wide[e] = op == Op::max ? numeric::join<Op::max>(wide[e], next) : numeric::join<Op::min>(wide[e], next);
      } else {
        wide[e] = numeric::join<Op::sum>(wide[e], next);
      }
    }
  }
  if constexpr (!extreme && !std::is_integral_v<Wide>) {
    if (op == Op::avg) {
#pragma unroll
      for (int e = 0; e < elements; ++e) wide[e] = wide[e] / static_cast<Wide>(n);
    }
  }
#pragma unroll
  for (int e = 0; e < elements; ++e) in.one[e] = T::narrow(wide[e]);
  return in.all;
}
template <class T, class V, class F>
__device__ __forceinline__ V fold(Op op, int n, F load) {
  return op == Op::max || op == Op::min ? fold<T, true, V>(op, n, load) : fold<T, false, V>(op, n, load);
}

// slots[k] is where the chunk of the k-th contribution begins; the self-th is `own`.
template <class T>
__device__ __noinline__ void reduce_as(const Place& to, const Place& own, int n, char* const* slots, int self,
                                       Range range, Op op, Lanes team) {
  using Stored = typename T::Stored;
  for_each_item(to, own, range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch write = stretch(to, k, at), mine = stretch(own, k, at);
    i64 shift = at - range.lo;  // a slot counts from the chunk's first byte
    auto source = [&](int r, i64 byte) -> const char* { return slots[r] + shift + byte; };
    if (write.aligned() && mine.aligned() && hi >> 35 == 0) {
      i64 whole = hi & ~i64{15};
      for (i64 b = lo + team.lane * vector_bytes; b < whole; b += team.lanes * vector_bytes) {
        unsigned v = static_cast<unsigned>(b / vector_bytes);
        auto load = [&](int r) { return *reinterpret_cast<const uint4*>(r == self ? mine.vector(v) : source(r, b)); };
        *reinterpret_cast<uint4*>(write.vector(v)) = fold<T, uint4>(op, n, load);
      }
      lo = larger(lo, whole);
    }
    constexpr i64 size = sizeof(Stored);
    for (i64 b = lo + team.lane * size; b < hi; b += team.lanes * size) {
      auto load = [&](int r) { return *reinterpret_cast<const Stored*>(r == self ? mine.byte(b) : source(r, b)); };
      *reinterpret_cast<Stored*>(write.byte(b)) = fold<T, Stored>(op, n, load);
    }
  });
}
__device__ __forceinline__ void reduce(const Place& to, const Place& own, int n, char* const* slots, int self,
                                       Range range, Sum sum, Lanes team) {
  numeric::with_dtype(sum.dtype,
                      [&](auto type) { reduce_as<decltype(type)>(to, own, n, slots, self, range, sum.op, team); });
}

}  // namespace purlin::gpu
