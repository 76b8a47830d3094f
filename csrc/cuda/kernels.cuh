// What the kernels have in common. A block is one team of one rank; ranks of a world on one GPU may share a launch, *fused*: its grid holds the teams of
// all of them, team-major. Each file of kernels is compiled on its own; the host chooses one for a call.
#pragma once
#include "../purlin/atom/block.cuh"

namespace purlin::gpu {

template <int ranks>  // at most
struct Launches {
  Launch of[ranks];
};
constexpr int most_fused = 8;
static_assert(sizeof(Launches<most_fused>) <= 32764, "a kernel's arguments");

struct Seat {
  const Launch& launch;
  int team;
};
template <int ranks>
__device__ __forceinline__ Seat seat(const Launches<ranks>& all) {
  int block = static_cast<int>(blockIdx.x);
  if constexpr (ranks == 1) return {all.of[0], block};
  int here = ranks == 2 ? 2 : all.of[0].call.ranks;
  return {all.of[block % here], block / here};
}

struct Choice {
  const void* kernel;
  int threads;
  int shared_bytes;  // beside what the kernel declares
};

// Calls of `ranks` ranks (1, 2, or up to most_fused) in a launch; `call` is any of theirs. bulk: the GPU has bulk copies.
Choice packets(const Call& call, int ranks);
Choice packet_sums(const Call& call, int ranks);
Choice direct(const Call& call, int ranks, bool bulk);
Choice staged(const Call& call, int ranks, bool bulk);
Choice staged_sums(const Call& call, int ranks, bool bulk);

template <class One, class Two, class Most>
const void* by_ranks(int ranks, One one, Two two, Most most) {
  if (ranks == 1) return reinterpret_cast<const void*>(one);
  return ranks == 2 ? reinterpret_cast<const void*>(two) : reinterpret_cast<const void*>(most);
}

}  // namespace purlin::gpu
