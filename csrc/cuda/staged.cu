#include "../purlin/atom/apart.cuh"
#include "../purlin/atom/relay.cuh"
#include "../purlin/snac.hpp"
#include "kernels.cuh"

namespace purlin::gpu {

constexpr int copiers = 256;
using Plain = Apart<Copies, copiers>;

template <int ranks>
__global__ void __launch_bounds__(2 * Plain::role_threads, 1)
    staged_kernel(const __grid_constant__ Launches<ranks> all) {
  __shared__ Crossing<copiers> crossings[2];
  __shared__ Tally tally;
  auto [launch, team] = seat(all);
  if (threadIdx.x < 2) crossings[threadIdx.x].init();
  tally.read(launch.call, team);
  int thread = static_cast<int>(threadIdx.x), role = thread / Plain::role_threads;
  Plain atom(launch, team, role, thread % Plain::role_threads, crossings + role, &tally);
  if (!atom.enter()) return;
  snac::staged_copy(atom, launch.call);
  atom.leave();
}

template <int ranks>
__global__ void __launch_bounds__(2 * relay_threads, 1)
    staged_bulk_kernel(const __grid_constant__ Launches<ranks> all) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Cells all_cells[2];
  __shared__ Tally tally;
  auto [launch, team] = seat(all);
  if (threadIdx.x < 2) all_cells[threadIdx.x].init();
  tally.read(launch.call, team);
  int thread = static_cast<int>(threadIdx.x);
  Relay atom(launch, team, thread / relay_threads, thread % relay_threads, all_cells, memory, &tally);
  if (!atom.enter()) return;
  snac::staged_copy(atom, launch.call);
  atom.leave();
}

Choice staged(const Call&, int ranks, bool bulk) {
  if (bulk)
    return {by_ranks(ranks, staged_bulk_kernel<1>, staged_bulk_kernel<2>, staged_bulk_kernel<most_fused>),
            2 * relay_threads, 2 * cells * cell_bytes};
  return {by_ranks(ranks, staged_kernel<1>, staged_kernel<2>, staged_kernel<most_fused>), 2 * Plain::role_threads, 0};
}

}  // namespace purlin::gpu
