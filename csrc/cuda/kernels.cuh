// What the kernels have in common. A block is one team of one rank, or one role of it; ranks of a world on one GPU may share a launch, *fused*: at each place
// in its grid all of them have a block. Each file of kernels is compiled on its own; the host chooses one for a call.
#pragma once
#include "../purlin/atom/tally.cuh"

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

// Where the roles of a team run side by side: in one block, the staging role in its first `staging` threads and the consuming one in the rest; or in a
// block each, of as many threads as the larger role has. Threads of a block that has more than its role needs play none.
struct Part {
  const Launch& launch;
  int parts;               // blocks of the team
  int team, role, thread;  // of the role
};
// Blocks in the grid's order: the roles of a team, team by team; or the teams of a role, role by role. A GPU puts neighbours near one another: between two
// GPUs rings are 2 to 6 % faster by role, and direct calls up to 5 % by team.
enum class Order { by_team, by_role };

template <int staging, int consuming, Order order, int ranks>
__device__ __forceinline__ Part part(const Launches<ranks>& all) {
  auto [launch, seat_number] = seat(all);
  int thread = static_cast<int>(threadIdx.x), here = ranks == 1 ? 1 : ranks == 2 ? 2 : all.of[0].call.ranks;
  int teams = launch.call.teams, all_blocks = static_cast<int>(gridDim.x);
  if (all_blocks == teams * here)
    return {launch, 1, seat_number, thread < staging ? stages : consumes, thread < staging ? thread : thread - staging};
  int parts = all_blocks == 2 * teams * here ? 2 : 3;
  int role = order == Order::by_team ? seat_number % parts : seat_number / teams;
  int team = order == Order::by_team ? seat_number / parts : seat_number % teams;
  return {launch, parts, team, thread < (role == consumes ? consuming : staging) ? role : idle, thread};
}

struct Choice {
  const void* kernel;
  int threads;
  int shared_bytes;  // beside what the kernel declares
  int parts = 1;     // blocks a team
};
// A kernel for which part() tells the roles apart: in one block a team, or in as many as the call may have.
constexpr Choice side_by_side(const void* kernel, int staging, int consuming, int shared_bytes, int parts) {
  return {kernel, parts > 1 ? larger(staging, consuming) : staging + consuming, shared_bytes, parts};
}

// Calls of `ranks` ranks (1, 2, or up to most_fused) in a launch; `call` is any of theirs. bulk: the GPU has bulk copies.
Choice packets(const Call& call, int ranks);
Choice packet_sums(const Call& call, int ranks);
Choice direct(const Call& call, int ranks, bool bulk);
Choice direct_sums(const Call& call, int ranks);
Choice staged(const Call& call, int ranks, bool bulk);
Choice staged_sums(const Call& call, int ranks, bool bulk);

template <class One, class Two, class Most>
const void* by_ranks(int ranks, One one, Two two, Most most) {
  if (ranks == 1) return reinterpret_cast<const void*>(one);
  return ranks == 2 ? reinterpret_cast<const void*>(two) : reinterpret_cast<const void*>(most);
}

}  // namespace purlin::gpu
