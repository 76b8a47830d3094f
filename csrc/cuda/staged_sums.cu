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
constexpr int adders = 256;  // that registers suffice for what each has on its way
template <class Adding>
using Adder = Apart<Adding, adders>;
constexpr int sums_threads = relay_threads + Adder<AddsAny>::role_threads;

template <class Adding, int ranks>
__global__ void __launch_bounds__(sums_threads, 1)
    staged_sums_bulk_kernel(const __grid_constant__ Launches<ranks> all) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Cells all_cells[1];
  __shared__ Crossing<adders> crossing;
  __shared__ Tally tally;
  auto [launch, team] = seat(all);
  int thread = static_cast<int>(threadIdx.x), role = thread < relay_threads ? 0 : 1;
  if (thread == 0) all_cells[0].init();
  if (thread == relay_threads) crossing.init();
  tally.read(launch.call, team);
  Relay staging(launch, team, 0, thread, all_cells, memory, &tally);
  Adder<Adding> adding(launch, team, role, thread - relay_threads, &crossing, &tally);
  if (!adding.enter()) return;
  snac::staged_sum(adding, staging, launch.call);
  adding.leave();
}

// Sums of the dtypes that models are made of have kernels of their own; all others share one.
template <int ranks>
const void* bulk_kernel_for(const Call& call) {
  if (!is_extreme(call.sum.op)) {
    switch (call.sum.dtype) {
      case Dtype::float32:
        return reinterpret_cast<const void*>(staged_sums_bulk_kernel<Adds<Dtype::float32, false>, ranks>);
      case Dtype::float16:
        return reinterpret_cast<const void*>(staged_sums_bulk_kernel<Adds<Dtype::float16, false>, ranks>);
      case Dtype::bfloat16:
        return reinterpret_cast<const void*>(staged_sums_bulk_kernel<Adds<Dtype::bfloat16, false>, ranks>);
      default: break;
    }
  }
  return reinterpret_cast<const void*>(staged_sums_bulk_kernel<AddsAny, ranks>);
}

Choice staged_sums(const Call& call, int ranks, bool bulk) {
  if (bulk)
    return {ranks == 1 ? bulk_kernel_for<1>(call) : bulk_kernel_for<most_fused>(call), sums_threads,
            cells * cell_bytes};
  return {ranks == 1 ? reinterpret_cast<const void*>(staged_sums_kernel<1>)
                     : reinterpret_cast<const void*>(staged_sums_kernel<most_fused>),
          plain_threads, 0};
}

}  // namespace purlin::gpu
