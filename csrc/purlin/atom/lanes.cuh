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
  if (place.flat()) return {nullptr, place.begin() + at};
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

// ---- flat copies, by a warp or more

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

// 16 bytes of a and b from byte `shift` of a on; 0 < shift < 16.
__device__ __forceinline__ uint4 spliced(uint4 a, uint4 b, unsigned shift) {
  unsigned w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 6; ++i)
    if (shift & 8) w[i] = w[i + 2];
#pragma unroll
  for (int i = 0; i < 5; ++i)
    if (shift & 4) w[i] = w[i + 1];
  unsigned bit = 8 * (shift & 3);
  return {__funnelshift_r(w[0], w[1], bit), __funnelshift_r(w[1], w[2], bit), __funnelshift_r(w[2], w[3], bit),
          __funnelshift_r(w[3], w[4], bit)};
}
// Bytes that do not begin at a vector on both sides: a vector that is stored is spliced of two that are loaded. Nothing beyond the bytes is read.
inline __device__ __noinline__ void copy_spliced(char* to, const char* from, i64 bytes, Lanes team) {
  constexpr int pairs = 2;
  int head = static_cast<int>(-bits(to) & 15);
  unsigned shift = static_cast<unsigned>(bits(from) + static_cast<unsigned>(head)) & 15;
  if (static_cast<unsigned>(head) < shift) head += vector_bytes;  // before it no vector begins
  i64 vectors = (bytes - head + shift) / vector_bytes - (shift != 0);
  if (vectors <= 0) vectors = head = 0;
  i64 left = vectors - team.lane;
  char* write = ptx::here(to + head + team.lane * vector_bytes);
  const char* read = ptx::here(from + head - shift + team.lane * vector_bytes);
  int step = team.lanes * vector_bytes;
#pragma unroll 1
  for (; left > 0; left -= pairs * team.lanes, read += pairs * step, write += pairs * step) {
    uint4 low[pairs], high[pairs];
#pragma unroll
    for (int u = 0; u < pairs; ++u) {
      if (u * team.lanes >= left) continue;
      low[u] = ptx::load_vector(read + u * step);
      if (shift != 0) high[u] = ptx::load_vector(read + u * step + vector_bytes);
    }
#pragma unroll
    for (int u = 0; u < pairs; ++u)
      if (u * team.lanes < left)
        ptx::store_vector(write + u * step, shift != 0 ? spliced(low[u], high[u], shift) : low[u]);
  }
#pragma unroll 1
  for (i64 at = team.lane; at < head; at += team.lanes) to[at] = from[at];
#pragma unroll 1
  for (i64 at = head + vectors * vector_bytes + team.lane; at < bytes; at += team.lanes) to[at] = from[at];
}

constexpr i64 most_bytes = i64{1} << 35;  // that 31 bits of vectors count

__device__ __forceinline__ bool lie_in_vectors(const char* to, const char* from, i64 bytes) {
  return ((bits(to) | bits(from)) & 15) == 0 && bytes < most_bytes;
}
// Where they do, but for the last few bytes.
__device__ __forceinline__ void copy_even(char* to, const char* from, i64 bytes, Lanes team) {
  i64 whole = bytes & ~i64{15};
  copy_vectors(
      0, static_cast<unsigned>(whole / vector_bytes), team,
      [&](unsigned v) { return from + static_cast<i64>(v) * vector_bytes; },
      [&](unsigned v) { return to + static_cast<i64>(v) * vector_bytes; });
  if (i64 at = whole + team.lane; at < bytes) to[at] = from[at];
}
__device__ __forceinline__ void copy_flat(char* to, const char* from, i64 bytes, Lanes team) {
  if (to == from) return;
  if (!lie_in_vectors(to, from, bytes)) return copy_spliced(to, from, bytes, team);
  copy_even(to, from, bytes, team);
}

inline __device__ __noinline__ void copy_called(char* to, const char* from, i64 bytes, Lanes team) {
  copy_flat(to, from, bytes, team);
}

// ---- copies of boxes

template <class V>
__device__ __forceinline__ void copy_units(Stretch to, Stretch from, i64 lo, i64 hi, Lanes team) {
#pragma unroll 1
  for (i64 at = lo + team.lane * static_cast<i64>(sizeof(V)); at < hi; at += team.lanes * static_cast<i64>(sizeof(V)))
    *reinterpret_cast<V*>(to.byte(at)) = *reinterpret_cast<const V*>(from.byte(at));
}
// Short runs that do not lie in vectors.
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

// Bytes that lie together on both sides, wherever a multiple of them begins. Not both are flat.
__device__ __forceinline__ i64 common_run(const Stretch& a, const Stretch& b) {
  if (a.flat()) return b.box->run;
  if (b.flat()) return a.box->run;
  i64 more = larger(a.box->run, b.box->run), less = smaller(a.box->run, b.box->run);
#pragma unroll 1
  while (i64 rest = more % less) more = less, less = rest;
  return less;
}
constexpr i64 long_run = i64{warp} * vector_bytes;
// A warp takes a run at a time, or a part of one that its lanes hold at once: so not every lane finds out where every vector lies.
inline __device__ __noinline__ void copy_runs(const Stretch& to, const Stretch& from, i64 lo, i64 hi, i64 run,
                                              bool even, Lanes team) {
  constexpr i64 most = i64{warp} * in_flight * vector_bytes;
  int warps = team.lanes / warp, mine = team.lane / warp;
  if (mine >= warps) return;
  i64 parts_of_run = ceil_div(run, most), part = round_up(ceil_div(run, parts_of_run), vector_bytes);  // about equal
  unsigned parts = static_cast<unsigned>(parts_of_run);
#pragma unroll 1
  for (unsigned n = static_cast<unsigned>(lo / run) * parts + static_cast<unsigned>(lo % run / part + mine);;
       n += static_cast<unsigned>(warps)) {
    i64 row = i64{n / parts} * run, begin = row + n % parts * part;
    if (begin >= hi) return;
    i64 first = larger(lo, begin), end = smaller(hi, smaller(row + run, begin + part));
    if (first >= end) continue;
    unsigned vector = static_cast<unsigned>(first / vector_bytes);
    copy_called(even ? to.vector(vector) : to.byte(first), even ? from.vector(vector) : from.byte(first), end - first,
                {team.lane % warp, warp});
  }
}
inline __device__ __noinline__ void copy_stretch(Stretch to, Stretch from, i64 lo, i64 hi, Lanes team) {
  if (to.flat() && from.flat()) return copy_flat(to.first + lo, from.first + lo, hi - lo, team);
  bool even = to.aligned() && from.aligned() && hi < most_bytes;
  if (i64 run = common_run(to, from); run >= long_run) return copy_runs(to, from, lo, hi, run, even, team);
  if (!even) return copy_odd(to, from, lo, hi, team);
  copy_vectors(
      static_cast<unsigned>(lo / vector_bytes), static_cast<unsigned>(hi / vector_bytes), team,
      [&](unsigned v) { return from.vector(v); }, [&](unsigned v) { return to.vector(v); });
}
inline __device__ __noinline__ void copy_boxes(const Place& to, const Place& from, Range range, Lanes team) {
  for_each_item(to, from, range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch there = stretch(to, k, at), here = stretch(from, k, at);
    if (there.first != here.first) copy_stretch(there, here, lo, hi, team);  // but in place
  });
}
__device__ __forceinline__ void copy(const Place& to, const Place& from, Range range, Lanes team) {
  if (to.flat() && from.flat()) {
    copy_flat(to.begin() + range.lo, from.begin() + range.lo, range.hi - range.lo, team);
  } else {
    copy_boxes(to, from, range, team);
  }
}
// The same where latency is not at stake: small where it is called.
__device__ __forceinline__ void copy_apart(const Place& to, const Place& from, Range range, Lanes team) {
  if (to.flat() && from.flat()) {
    copy_called(to.begin() + range.lo, from.begin() + range.lo, range.hi - range.lo, team);
  } else {
    copy_boxes(to, from, range, team);
  }
}

}  // namespace purlin::gpu
