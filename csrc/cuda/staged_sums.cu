#include "../purlin/snac.hpp"
#include "rings.cuh"

namespace purlin::gpu {

// Without bulk copies: both roles alike.
constexpr int plain_threads = 2 * Plain<AddsAny>::role_threads;

template <int ranks>
__global__ void __launch_bounds__(plain_threads, 1) staged_sums_kernel(const __grid_constant__ Launches<ranks> all) {
  by_apart<AddsAny>(all, [](auto& hands, const Call& call) { snac::staged_sum(hands, hands, call); });
}

// With them: two warps stage, all others add.
constexpr int many_copiers = 512;
using Adders = Apart<AddsAny, many_copiers>;
constexpr int sums_threads = relay_threads + Adders::role_threads;

template <int ranks>
__global__ void __launch_bounds__(sums_threads, 1)
    staged_sums_bulk_kernel(const __grid_constant__ Launches<ranks> all) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Cells all_cells[1];
  __shared__ Crossing<many_copiers> crossing;
  __shared__ Tally tally;
  auto [launch, team] = seat(all);
  int thread = static_cast<int>(threadIdx.x), role = thread < relay_threads ? 0 : 1;
  if (thread == 0) all_cells[0].init();
  if (thread == relay_threads) crossing.init();
  tally.read(launch.call, team);
  Relay staging(launch, team, 0, thread, all_cells, memory, &tally);
  Adders adding(launch, team, role, thread - relay_threads, &crossing, &tally);
  if (!adding.enter()) return;
  snac::staged_sum(adding, staging, launch.call);
  adding.leave();
}

Choice staged_sums(const Call&, int ranks, bool bulk) {
  if (bulk)
    return {ranks == 1 ? reinterpret_cast<const void*>(staged_sums_bulk_kernel<1>)
                       : reinterpret_cast<const void*>(staged_sums_bulk_kernel<most_fused>),
            sums_threads, cells * cell_bytes};
  return {ranks == 1 ? reinterpret_cast<const void*>(staged_sums_kernel<1>)
                     : reinterpret_cast<const void*>(staged_sums_kernel<most_fused>),
          plain_threads, 0};
}

}  // namespace purlin::gpu
