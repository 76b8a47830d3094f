// How a call of rings begins and ends: its counts are kept near, and the call is counted.
#pragma once
#include "block.cuh"

namespace purlin::gpu {

// The counts of a team at entry, in shared memory: a lane that acquires empties the cache that they would lie in.
class Tally {
 public:
  __device__ void read(const Call& c, int team) {
    constexpr int words = sizeof(Counts) / sizeof(Word);
    for (int k = static_cast<int>(threadIdx.x); k < c.peers() * words; k += static_cast<int>(blockDim.x))
      reinterpret_cast<Word*>(of_)[k] = reinterpret_cast<const Word*>(&c.count(k / words, team))[k % words];
  }
  __device__ Word sent(Use use, int peer) const { return of_[peer].sent[static_cast<int>(use)]; }
  __device__ Word taken(Use use, int peer) const { return of_[peer].taken[static_cast<int>(use)]; }

 private:
  Counts of_[max_ranks - 1];
};

// All lanes of a block: false when the communicator is dead, which the host is told.
__device__ __forceinline__ bool is_alive(const Launch& l) {
  Word poison = threadIdx.x == 0 ? ptx::load_relaxed(poison_of(l.call, l.call.rank)) : 0;
  if (poison != 0) tell_host(l, poison);
  return !__syncthreads_or(poison != 0);
}
__device__ __forceinline__ void count_call(const Launch& l, int team) {
  __syncthreads();
  if (threadIdx.x == 0 && team == 0) l.call.progress->calls += 1;
}

}  // namespace purlin::gpu
