#include "../purlin/snac.hpp"
#include "rings.cuh"

namespace purlin::gpu {

// Without bulk copies: both roles alike.
constexpr int plain_threads = Plain<AddsAny>::role_threads;

template <int ranks>
__global__ void __launch_bounds__(2 * plain_threads, 1)
    staged_sums_kernel(const __grid_constant__ Launches<ranks> all) {
  by_apart<AddsAny>(all, [](auto& hands, const Call& call) { snac::staged_sum(hands, hands, hands, call); });
}

// With them: two warps stage, all others add, and gather, too, unless that has a block of its own: then two warps do.
constexpr int adders = 256;  // that registers suffice for what each has on its way
template <class Adding>
using Adder = Apart<Adding, adders>;
constexpr int adding_threads = Adder<AddsAny>::role_threads;

template <class Adding, int ranks>
__global__ void __launch_bounds__(relay_threads + adding_threads, 1)
    staged_sums_bulk_kernel(const __grid_constant__ Launches<ranks> all) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Cells all_cells[1];
  __shared__ Crossing<adders> crossing;
  __shared__ Tally tally;
  auto [launch, parts, team, role, thread] = part<relay_threads, adding_threads, Order::by_role>(all);
  if (threadIdx.x == 0) all_cells[0].init();
  if (threadIdx.x == relay_threads) crossing.init();
  tally.read(launch.call, team);
  Relay carrying(launch, team, role, thread, all_cells, memory, &tally);
  Adder<Adding> adding(launch, team, role, thread, &crossing, &tally);
  if (!adding.enter()) return;
  if (parts == 3) {
    snac::staged_sum(adding, carrying, carrying, launch.call);
  } else {
    snac::staged_sum(adding, carrying, adding, launch.call);
  }
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
    return side_by_side(ranks == 1 ? bulk_kernel_for<1>(call) : bulk_kernel_for<most_fused>(call), relay_threads,
                        adding_threads, role_bytes, call.parts);
  return side_by_side(ranks == 1 ? reinterpret_cast<const void*>(staged_sums_kernel<1>)
                                 : reinterpret_cast<const void*>(staged_sums_kernel<most_fused>),
                      plain_threads, plain_threads, 0, smaller(call.parts, 2));
}

}  // namespace purlin::gpu
