// Reductions by many lanes at once: what lies in slots and in a tensor of this rank is added into a tensor.
#pragma once
#include "fold.cuh"
#include "lanes.cuh"

namespace purlin::gpu {

// Units V at [lo, hi) of wire bytes, several a lane side by side, two contributions of each on their way: load(k, byte) is the k-th contribution's,
// store(byte, V) takes the result.
template <class T, bool extreme, class V, int side_by_side, class Load, class Store>
__device__ __forceinline__ void fold_units(i64 lo, i64 hi, int n, Op op, Lanes team, Load load, Store store) {
  constexpr i64 size = sizeof(V);
  i64 step = team.lanes * size;
#pragma unroll 1
  for (i64 b = lo + team.lane * size; b < hi; b += side_by_side * step) {
    Fold<T, extreme, V> fold[side_by_side];
    V held[side_by_side] = {}, more[side_by_side] = {};
#pragma unroll
    for (int u = 0; u < side_by_side; ++u)
      if (b + u * step < hi) held[u] = load(0, b + u * step);
#pragma unroll
    for (int u = 0; u < side_by_side; ++u)
      if (n > 1 && b + u * step < hi) more[u] = load(1, b + u * step);
#pragma unroll
    for (int u = 0; u < side_by_side; ++u) fold[u].first(held[u]);
#pragma unroll 1
    for (int k = 1; k < n; ++k) {
#pragma unroll
      for (int u = 0; u < side_by_side; ++u) fold[u].next(more[u], op);
#pragma unroll
      for (int u = 0; u < side_by_side; ++u)
        if (k + 1 < n && b + u * step < hi) more[u] = load(k + 1, b + u * step);
    }
#pragma unroll
    for (int u = 0; u < side_by_side; ++u)
      if (b + u * step < hi) store(b + u * step, fold[u].rounded(op, n));
  }
}

// slots[k] is where the chunk of the k-th contribution begins; the self-th is `own`.
template <class A>
__device__ __noinline__ void reduce_boxes(const Place& to, const Place& own, int n, char* const* slots, int self,
                                          Range range, Op op, Lanes team) {
  using T = typename A::T;
  using Stored = typename T::Stored;
  for_each_item(to, own, range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch write = stretch(to, k, at), mine = stretch(own, k, at);
    i64 shift = at - range.lo;  // a slot counts from the chunk's first byte
    if constexpr (adds_in_vectors(A::dtype)) {
      if (write.aligned() && mine.aligned() && hi < most_bytes) {
        i64 whole = hi & ~i64{15};
        constexpr int side_by_side = sizeof(Stored);  // few enough for the registers
        auto load = [&](int r, i64 b) {
          return ptx::load_vector(r == self ? mine.vector(static_cast<unsigned>(b / vector_bytes))
                                            : slots[r] + shift + b);
        };
        auto store = [&](i64 b, uint4 v) {
          ptx::store_vector(write.vector(static_cast<unsigned>(b / vector_bytes)), v);
        };
        fold_units<T, A::extreme, uint4, side_by_side>(lo, whole, n, op, team, load, store);
        lo = larger(lo, whole);
      }
    }
    fold_units<T, A::extreme, Stored, 1>(
        lo, hi, n, op, team,
        [&](int r, i64 b) { return *reinterpret_cast<const Stored*>(r == self ? mine.byte(b) : slots[r] + shift + b); },
        [&](i64 b, Stored v) { *reinterpret_cast<Stored*>(write.byte(b)) = v; });
  });
}

// The same of flat places, all in vectors: nothing of it lies in memory but the bytes.
template <class A>
__device__ __noinline__ void reduce_flat(char* to, const char* own, int n, char* const* slots, int self, i64 bytes,
                                         Op op, Lanes team) {
  auto load = [&](int k, i64 b) { return ptx::load_vector((k == self ? own : slots[k]) + b); };
  auto store = [&](i64 b, uint4 v) { ptx::store_vector(to + b, v); };
  fold_units<typename A::T, A::extreme, uint4, sizeof(typename A::T::Stored)>(0, bytes, n, op, team, load, store);
}
// Two contributions, the lower rank's first, into one place or two, all in vectors: every byte of a chunk is asked for before the first is added.
template <class A>
__device__ __forceinline__ void add_two(char* to, char* also, const char* first, const char* second, i64 bytes, Op op,
                                        Lanes team) {
  constexpr int side_by_side = 8;
  i64 step = team.lanes * vector_bytes;
#pragma unroll 1
  for (i64 b = team.lane * vector_bytes; b < bytes; b += side_by_side * step) {
    uint4 x[side_by_side], y[side_by_side];
#pragma unroll
    for (int u = 0; u < side_by_side; ++u)
      if (b + u * step < bytes) x[u] = ptx::load_vector(first + b + u * step);
#pragma unroll
    for (int u = 0; u < side_by_side; ++u)
      if (b + u * step < bytes) y[u] = ptx::load_vector(second + b + u * step);
#pragma unroll
    for (int u = 0; u < side_by_side; ++u) {
      if (b + u * step >= bytes) break;
      uint4 sum = added<A>(x[u], y[u], op);
      if (also) ptx::store_vector(also + b + u * step, sum);  // it has farther to go
      ptx::store_vector(to + b + u * step, sum);
    }
  }
}
// False, and nothing done, where the bytes do not lie in vectors one after the other, or are not added in vectors.
template <class A>
__device__ __forceinline__ bool reduce_two(const Place& to, const Place& also, const Place& own, char* slot, int self,
                                           Range range, Op op, Lanes team) {
  if constexpr (adds_in_vectors(A::dtype)) {
    if (!to.flat() || !own.flat()) return false;
    char *write = to.first + range.lo, *mine = own.first + range.lo;
    char* more = also.first ? also.first + range.lo : nullptr;
    i64 bytes = range.hi - range.lo;
    if (((bits(write) | bits(mine) | static_cast<unsigned long long>(bytes)) & 15) != 0) return false;
    add_two<A>(write, more, self == 0 ? mine : slot, self == 0 ? slot : mine, bytes, op, team);
    return true;
  }
  return false;
}
template <class A>
__device__ __forceinline__ void reduce(const Place& to, const Place& own, int n, char* const* slots, int self,
                                       Range range, Op op, Lanes team) {
  if constexpr (adds_in_vectors(A::dtype)) {
    char *write = to.first + range.lo, *mine = own.first + range.lo;
    i64 bytes = range.hi - range.lo;
    if (to.flat() && own.flat() && ((bits(write) | bits(mine) | static_cast<unsigned long long>(bytes)) & 15) == 0)
      return reduce_flat<A>(write, mine, n, slots, self, bytes, op, team);
  }
  reduce_boxes<A>(to, own, n, slots, self, range, op, team);
}

}  // namespace purlin::gpu
