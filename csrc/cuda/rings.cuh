// How kernels whose two roles run side by side begin and end: shared memory laid out, counts read, hands made. call(hands, call) is the protocol's.
#pragma once
#include "../purlin/atom/apart.cuh"
#include "../purlin/atom/relay.cuh"
#include "kernels.cuh"

namespace purlin::gpu {

constexpr int relay_bytes = 2 * cells * cell_bytes;  // of both roles, dynamic

template <int ranks, class F>
__device__ __forceinline__ void by_relay(const Launches<ranks>& all, char* memory, F call) {
  __shared__ Cells all_cells[2];
  __shared__ Tally tally;
  auto [launch, team] = seat(all);
  if (threadIdx.x < 2) all_cells[threadIdx.x].init();
  tally.read(launch.call, team);
  int thread = static_cast<int>(threadIdx.x);
  Relay hands(launch, team, thread / relay_threads, thread % relay_threads, all_cells, memory, &tally);
  if (!hands.enter()) return;
  call(hands, launch.call);
  hands.leave();
}

constexpr int plain_copiers = 256;  // of a role
template <class Adding>
using Plain = Apart<Adding, plain_copiers>;

template <class Adding, int ranks, class F>
__device__ __forceinline__ void by_apart(const Launches<ranks>& all, F call) {
  __shared__ Crossing<plain_copiers> crossings[2];
  __shared__ Tally tally;
  auto [launch, team] = seat(all);
  if (threadIdx.x < 2) crossings[threadIdx.x].init();
  tally.read(launch.call, team);
  constexpr int role_threads = Plain<Adding>::role_threads;
  int thread = static_cast<int>(threadIdx.x), role = thread / role_threads;
  Plain<Adding> hands(launch, team, role, thread % role_threads, crossings + role, &tally);
  if (!hands.enter()) return;
  call(hands, launch.call);
  hands.leave();
}

}  // namespace purlin::gpu
