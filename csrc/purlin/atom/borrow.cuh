// Borrow: Together, for direct sums. Contributions are read where they lie, in what peers have lent, and sums of an all-reduce go back to all of them. No
// lane waits for another between the grants and the notify: each loads from every rank, adds, and stores to every place.
#pragma once
#include "sums.cuh"
#include "together.cuh"

namespace purlin::gpu {

struct Borrowed {  // in shared memory, of the range that is added: where the k-th contribution and the k-th place begin
  char *from[max_ranks], *to[max_ranks];
  char* odd[max_ranks];  // the contributions once more, from where vectors end
};

// More than two contributions, all in vectors, into one place or as many: several of each are asked for before the first is added.
template <class A>
__device__ __forceinline__ void add_borrowed(const Borrowed& b, int places, int n, i64 bytes, Op op, Lanes team) {
  constexpr int side_by_side = 2, ahead = 4;
  i64 step = team.lanes * vector_bytes;
#pragma unroll 1
  for (i64 at = team.lane * vector_bytes; at < bytes; at += side_by_side * step) {
    Fold<typename A::T, A::extreme, uint4> fold[side_by_side];
    auto here = [&](int u) { return at + u * step < bytes; };
#pragma unroll 1
    for (int first = 0; first < n; first += ahead) {
      uint4 held[ahead][side_by_side] = {};
#pragma unroll
      for (int k = 0; k < ahead; ++k)
#pragma unroll
        for (int u = 0; u < side_by_side; ++u)
          if (first + k < n && here(u)) held[k][u] = ptx::load_vector(b.from[first + k] + at + u * step);
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        if (first + k >= n) break;
#pragma unroll
        for (int u = 0; u < side_by_side; ++u) {
          if (first + k == 0) {
            fold[u].first(held[k][u]);
          } else {
            fold[u].next(held[k][u], op);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < side_by_side; ++u) {
      if (!here(u)) break;
      uint4 sum = fold[u].rounded(op, n);
#pragma unroll 1
      for (int k = 0; k < places; ++k) ptx::store_vector(b.to[k] + at + u * step, sum);
    }
  }
}

// Element by element, wherever they lie: the last few bytes, and outputs that begin between two vectors.
template <class A>
__device__ __noinline__ void add_elements(const Place& to, const Place& own, int n, char* const* from, int self,
                                          Range range, Op op, Lanes team) {
  using Stored = typename A::T::Stored;
  for_each_item(to, own, range, [&](int k, i64 at, i64 lo, i64 hi) {
    Stretch write = stretch(to, k, at), mine = stretch(own, k, at);
    auto load = [&](int r, i64 b) {
      return *reinterpret_cast<const Stored*>(r == self ? mine.byte(b) : from[r] + (at - range.lo) + b);
    };
    auto store = [&](i64 b, Stored v) { *reinterpret_cast<Stored*>(write.byte(b)) = v; };
    fold_units<typename A::T, A::extreme, Stored, 1>(lo, hi, n, op, team, load, store);
  });
}

template <bool all_flat, class Adding, int threads>
class Borrow : public Together<all_flat, threads> {
 public:
  __device__ Borrow(const Launch& launch, int team, Borrowed* borrowed)
      : Together<all_flat, threads>(launch, team), b_(borrowed) {}

  // Lent first; what a call counts is kept while others wait.
  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    consume.open();
    stage.open();
    consume.step(0);
    stage.close();
    consume.close();
    stage.step(1);
    consume.step(1);
  }
  // Adding takes all registers, so contributions that lie oddly are copied by code that needs few: spilled ones cost the whole call 0.2 us.
  __device__ void copy(const Place& to, const Place& from, Range range) {
    if constexpr (all_flat) {
      char *write = to.first + range.lo, *read = from.first + range.lo;
      i64 bytes = range.hi - range.lo;
      if (write == read) return;
      if (!gpu::lie_in_vectors(write, read, bytes))
        return copy_odd({nullptr, write}, {nullptr, read}, 0, bytes, lanes());
      copy_even(write, read, bytes, lanes());
    } else {
      gpu::copy(to, from, range, lanes());
    }
  }
  template <class T, class F>
  __device__ void reduce(int places, T to, const Place& own, int n, F slot, int self, Range range, Sum sum) {
    i64 done = 0;
    if constexpr (!std::is_same_v<Adding, AddsAny>) done = add_vectors(places, to, own, n, slot, self, range, sum.op);
    if (range.lo + done < range.hi) add_odd(places, to, own, n, slot, self, range, done, sum);
  }

 private:
  // Returns how many bytes it has added: none where they do not lie in vectors, else all but the last few.
  template <class T, class F>
  __device__ i64 add_vectors(int places, T to, const Place& own, int n, F slot, int self, Range range, Op op) {
    i64 whole = (range.hi - range.lo) & ~i64{15};
    char *write = to(0).first + range.lo, *mine = own.first + range.lo;
    if (!to(0).flat() || !own.flat() || ((bits(write) | bits(mine)) & 15) != 0) return 0;
    if (n == 2) {
      char *theirs = const_cast<char*>(slot(1 - self)), *also = places > 1 ? to(1).first + range.lo : nullptr;
      if (((bits(theirs) | bits(also)) & 15) != 0) return 0;
      add_two<Adding>(write, also, self == 0 ? mine : theirs, self == 0 ? theirs : mine, whole, op, lanes());
      return whole;
    }
    if (lanes().lane < n) {
      int k = ptx::here(lanes().lane);
      b_->from[k] = k == self ? mine : const_cast<char*>(slot(k));
      b_->to[k] = k < places ? to(k).first + range.lo : write;
    }
    __syncthreads();
    if (!lie_in_vectors(b_->from, n) || !lie_in_vectors(b_->to, n)) return 0;
    add_borrowed<Adding>(*b_, places, n, whole, op, lanes());
    return whole;
  }
  // From byte `done` of the range on: into my own output, and from there to the others.
  template <class T, class F>
  __device__ void add_odd(int places, T to, const Place& own, int n, F slot, int self, Range range, i64 done, Sum sum) {
    if (lanes().lane < n) {
      int k = ptx::here(lanes().lane);
      b_->odd[k] = k == self ? nullptr : const_cast<char*>(slot(k)) + done;
    }
    __syncthreads();
    Range rest{range.lo + done, range.hi};
    with_adds<Adding>(sum, [&](auto adds) {
      using Adds = decltype(adds);
      if (std::is_same_v<Adding, AddsAny> && lie_in_vectors(b_->odd, n)) {
        gpu::reduce<Adds>(to(0), own, n, b_->odd, self, rest, sum.op, lanes());
      } else {
        add_elements<Adds>(to(0), own, n, b_->odd, self, rest, sum.op, lanes());
      }
    });
    __syncthreads();  // other lanes have written what this one reads
#pragma unroll 1
    for (int k = 1; k < places; ++k) copy_apart(to(k), to(0), rest, lanes());
  }
  __device__ static bool lie_in_vectors(char* const* all, int n) {
    unsigned long long any = 0;
    for (int k = 0; k < n; ++k) any |= bits(all[k]);
    return (any & 15) == 0;
  }
  __device__ static Lanes lanes() { return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)}; }

  Borrowed* b_;
};

}  // namespace purlin::gpu
