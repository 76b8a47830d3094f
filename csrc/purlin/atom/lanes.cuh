// Bytes moved by many lanes at once: copies over Places, 16 bytes a lane wherever both sides allow it.
#pragma once
#include "block.cuh"

namespace purlin::gpu {

__device__ __forceinline__ unsigned long long bits(const void* p) { return reinterpret_cast<unsigned long long>(p); }

// ---- where bytes lie in boxes

// One item of a Place, or a stretch of a flat one: address of a byte counted from its first.
struct Stretch {
  const Box* box;  // nullptr: the bytes lie one after the other
  char* first;

  __device__ __forceinline__ bool flat() const { return box == nullptr; }
  __device__ __forceinline__ bool aligned() const {
    return (bits(first) & 15) == 0 && (flat() || (box->align == vector_bytes && box->run >> 35 == 0));
  }
  __device__ __forceinline__ int align() const {
    i64 all = static_cast<i64>(bits(first)) | (flat() ? vector_bytes : box->align);
    return static_cast<int>(all & -all);
  }
  __device__ __forceinline__ char* vector(unsigned v) const {  // aligned() only
    if (flat()) return first + static_cast<i64>(v) * vector_bytes;
    unsigned row = box->by_run.divide(v);
    return row_at(row) + static_cast<i64>(v - row * box->by_run.divisor) * vector_bytes;
  }
  __device__ __forceinline__ char* row_at(unsigned row) const {  // aligned() only, of a box
    i64 offset = 0;
#pragma unroll 1
    for (int d = box->dims - 1; d >= 0; --d) {
      unsigned outer = box->by_extent[d].divide(row);
      offset += static_cast<i64>(row - outer * box->by_extent[d].divisor) * box->stride[d];
      row = outer;
    }
    return first + offset;
  }
  __device__ __forceinline__ char* byte(i64 at) const { return flat() ? first + at : byte_of_box(at); }
  __device__ __noinline__ char* byte_of_box(i64 at) const {  // rare, and divisions are long
    i64 row = at / box->run, offset = at % box->run;
#pragma unroll 1
    for (int d = box->dims - 1; d >= 0; --d) {
      offset += row % box->extent[d] * box->stride[d];
      row /= box->extent[d];
    }
    return first + offset;
  }
};

// `item` of a place, which begins at wire byte `at`.
__device__ __forceinline__ Stretch stretch(const Place& place, int item, i64 at) {
  if (place.flat()) return {nullptr, place.first + at};
  const Box& box = place.items[item].box;
  return {box.dims ? &box : nullptr, place.base(box.tensor) + box.offset};
}

// Calls f(item, at, lo, hi) for each item of the places that `range` touches; lo and hi count from its first byte, wire byte `at`.
// Sides with items have the same ones; without any there is one stretch.
template <class F>
__device__ __forceinline__ void for_each_item(const Place& a, const Place& b, Range range, F f) {
  const Item* items = a.items ? a.items : b.items;
  if (!items) return f(0, range.lo, i64{0}, range.hi - range.lo);
  int count = a.items ? a.count : b.count;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    i64 at = items[k].at, lo = larger(range.lo, at), hi = smaller(range.hi, at + items[k].bytes);
    if (lo < hi) f(k, at, lo - at, hi - at);
  }
}

// ---- copies

template <class V>
__device__ __forceinline__ void copy_units(Stretch to, Stretch from, i64 lo, i64 hi, Lanes team) {
#pragma unroll 1
  for (i64 at = lo + team.lane * static_cast<i64>(sizeof(V)); at < hi; at += team.lanes * static_cast<i64>(sizeof(V)))
    *reinterpret_cast<V*>(to.byte(at)) = *reinterpret_cast<const V*>(from.byte(at));
}
inline __device__ __noinline__ void copy_odd(Stretch to, Stretch from, i64 lo, i64 hi, Lanes team) {
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

constexpr int in_flight = 8;  // vectors a lane holds

// Vectors [lo, hi): `at(v)` says where vector v is read from, `to(v)` where it goes. All of a round are loaded before the first is stored.
template <class From, class To>
__device__ __forceinline__ void copy_vectors(unsigned lo, unsigned hi, Lanes team, From from, To to) {
  unsigned step = static_cast<unsigned>(team.lanes), v = lo + static_cast<unsigned>(team.lane);
  uint4 held[in_flight];
#pragma unroll 1
  for (; v + (in_flight - 1) * step < hi; v += in_flight * step) {
#pragma unroll
    for (int u = 0; u < in_flight; ++u) held[u] = ptx::load_vector(from(v + static_cast<unsigned>(u) * step));
#pragma unroll
    for (int u = 0; u < in_flight; ++u) ptx::store_vector(to(v + static_cast<unsigned>(u) * step), held[u]);
  }
#pragma unroll
  for (int u = 0; u < in_flight; ++u)
    if (v + static_cast<unsigned>(u) * step < hi) held[u] = ptx::load_vector(from(v + static_cast<unsigned>(u) * step));
#pragma unroll
  for (int u = 0; u < in_flight; ++u)
    if (v + static_cast<unsigned>(u) * step < hi) ptx::store_vector(to(v + static_cast<unsigned>(u) * step), held[u]);
}

constexpr i64 most_bytes = i64{1} << 35;  // that 31 bits of vectors count

__device__ __forceinline__ void copy_flat(char* to, const char* from, i64 bytes, Lanes team) {
  if (to == from) return;
  if (((bits(to) | bits(from)) & 15) != 0 || bytes >= most_bytes)
    return copy_odd({nullptr, to}, {nullptr, const_cast<char*>(from)}, 0, bytes, team);
  i64 whole = bytes & ~i64{15};
  copy_vectors(
      0, static_cast<unsigned>(whole / vector_bytes), team,
      [&](unsigned v) { return from + static_cast<i64>(v) * vector_bytes; },
      [&](unsigned v) { return to + static_cast<i64>(v) * vector_bytes; });
  if (i64 at = whole + team.lane; at < bytes) to[at] = from[at];
}
// Vectors that lie together on both sides, wherever a multiple of them begins; 0: none do. Both are aligned, and not both flat.
__device__ __forceinline__ unsigned common_run(const Stretch& a, const Stretch& b) {
  if (a.flat()) return b.box->by_run.divisor;
  if (b.flat()) return a.box->by_run.divisor;
  unsigned more = larger(a.box->by_run.divisor, b.box->by_run.divisor);
  unsigned less = smaller(a.box->by_run.divisor, b.box->by_run.divisor);
  return more % less == 0 ? less : 0;
}
// Vectors [lo, hi) in runs: a warp takes one at a time, or a part of one that its lanes hold at once. So not every lane finds out where every vector lies.
inline __device__ __noinline__ void copy_runs(const Stretch& to, const Stretch& from, unsigned lo, unsigned hi,
                                              unsigned run, Lanes team) {
  constexpr unsigned part = warp * in_flight;
  unsigned parts = (run + part - 1) / part, warps = static_cast<unsigned>(team.lanes / warp);
  Lanes mine{team.lane % warp, warp};
#pragma unroll 1
  for (unsigned n = lo / run * parts + static_cast<unsigned>(team.lane / warp);; n += warps) {
    unsigned row = n / parts * run, begin = row + n % parts * part;
    if (begin >= hi) return;
    unsigned first = larger(lo, begin), end = smaller(hi, smaller(row + run, begin + part));
    if (first >= end) continue;
    const char* source = from.vector(first);
    char* place = to.vector(first);
    copy_vectors(
        0, end - first, mine, [&](unsigned v) { return source + i64{v} * vector_bytes; },
        [&](unsigned v) { return place + i64{v} * vector_bytes; });
  }
}
inline __device__ __noinline__ void copy_stretch(Stretch to, Stretch from, i64 lo, i64 hi, Lanes team) {
  if (to.flat() && from.flat()) return copy_flat(to.first + lo, from.first + lo, hi - lo, team);
  if (!to.aligned() || !from.aligned() || hi >= most_bytes) return copy_odd(to, from, lo, hi, team);
  unsigned first = static_cast<unsigned>(lo / vector_bytes), end = static_cast<unsigned>(hi / vector_bytes);
  if (unsigned run = common_run(to, from); run >= warp && team.lanes % warp == 0)
    return copy_runs(to, from, first, end, run, team);
  copy_vectors(first, end, team, [&](unsigned v) { return from.vector(v); }, [&](unsigned v) { return to.vector(v); });
}
inline __device__ __noinline__ void copy_boxes(const Place& to, const Place& from, Range range, Lanes team) {
  for_each_item(to, from, range, [&](int k, i64 at, i64 lo, i64 hi) {
    copy_stretch(stretch(to, k, at), stretch(from, k, at), lo, hi, team);
  });
}
__device__ __forceinline__ void copy(const Place& to, const Place& from, Range range, Lanes team) {
  if (to.flat() && from.flat()) {
    copy_flat(to.first + range.lo, from.first + range.lo, range.hi - range.lo, team);
  } else {
    copy_boxes(to, from, range, team);
  }
}
inline __device__ __noinline__ void copy_called(char* to, const char* from, i64 bytes, Lanes team) {
  copy_flat(to, from, bytes, team);
}
// The same where latency is not at stake: small where it is called.
__device__ __forceinline__ void copy_apart(const Place& to, const Place& from, Range range, Lanes team) {
  if (to.flat() && from.flat()) {
    copy_called(to.first + range.lo, from.first + range.lo, range.hi - range.lo, team);
  } else {
    copy_boxes(to, from, range, team);
  }
}

}  // namespace purlin::gpu
