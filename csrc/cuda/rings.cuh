// How kernels whose roles run side by side, two in one block or each in one of its own, begin and end: shared memory laid out, counts read, hands made.
// call(hands, call) is the protocol's; that of Relay, of whose roles there may be three, is told the team's blocks, too.
#pragma once
#include "../purlin/atom/apart.cuh"
#include "../purlin/atom/relay.cuh"
#include "kernels.cuh"

namespace purlin::gpu {

constexpr int role_bytes = cells * cell_bytes;  // of one role, dynamic

template <Order order, int ranks, class F>
__device__ __forceinline__ void by_relay(const Launches<ranks>& all, char* memory, F call) {
  __shared__ Cells all_cells[2];
  __shared__ Tally tally;
  auto [launch, parts, team, role, thread] = part<relay_threads, relay_threads, order>(all);
  if (threadIdx.x < 2) all_cells[threadIdx.x].init();
  tally.read(launch.call, team);
  int place = parts == 1 ? role : 0;  // in shared memory
  Relay hands(launch, team, role, thread, all_cells + place, memory + place * role_bytes, &tally);
  if (!hands.enter()) return;
  call(hands, launch.call, parts);
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
  auto [launch, parts, team, role, thread] = part<role_threads, role_threads, Order::by_role>(all);
  if (threadIdx.x < 2) crossings[threadIdx.x].init();
  tally.read(launch.call, team);
  Plain<Adding> hands(launch, team, role, thread, crossings + role, &tally);
  if (!hands.enter()) return;
  call(hands, launch.call);
  hands.leave();
}

}  // namespace purlin::gpu
