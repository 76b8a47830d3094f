// How kernels whose two roles run side by side, in one block or in two, begin and end: shared memory laid out, counts read, hands made. call(hands, call)
// is the protocol's.
#pragma once
#include "../purlin/atom/apart.cuh"
#include "../purlin/atom/relay.cuh"
#include "kernels.cuh"

namespace purlin::gpu {

constexpr int role_bytes = cells * cell_bytes;  // of one role, dynamic

template <int ranks, class F>
__device__ __forceinline__ void by_relay(const Launches<ranks>& all, char* memory, F call) {
  __shared__ Cells all_cells[2];
  __shared__ Tally tally;
  auto [launch, parts, team, role, thread] = part<relay_threads, relay_threads>(all);
  if (threadIdx.x < 2) all_cells[threadIdx.x].init();
  tally.read(launch.call, team);
  Relay hands(launch, team, role, thread, all_cells + role, memory + (parts == 1 ? role * role_bytes : 0), &tally);
  if (!hands.enter()) return;
  call(hands, launch.call);
  hands.leave();
}

inline Choice relayed(const void* kernel, int parts) {
  return side_by_side(kernel, relay_threads, relay_threads, (parts > 1 ? 1 : 2) * role_bytes, parts);
}

constexpr int plain_copiers = 256;  // of a role
template <class Adding>
using Plain = Apart<Adding, plain_copiers>;

template <class Adding, int ranks, class F>
__device__ __forceinline__ void by_apart(const Launches<ranks>& all, F call) {
  __shared__ Crossing<plain_copiers> crossings[2];
  __shared__ Tally tally;
  constexpr int role_threads = Plain<Adding>::role_threads;
  auto [launch, parts, team, role, thread] = part<role_threads, role_threads>(all);
  if (threadIdx.x < 2) crossings[threadIdx.x].init();
  tally.read(launch.call, team);
  Plain<Adding> hands(launch, team, role, thread, crossings + role, &tally);
  if (!hands.enter()) return;
  call(hands, launch.call);
  hands.leave();
}

}  // namespace purlin::gpu
