#include "../purlin/atom/borrow.cuh"
#include "../purlin/snac.hpp"
#include "kernels.cuh"

namespace purlin::gpu {

template <class Adding, bool flat, int ranks>
__device__ __forceinline__ void direct_sums(const Launches<ranks>& all) {
  __shared__ Borrowed borrowed;
  auto [launch, team] = seat(all);
  Borrow<flat, Adding> atom(launch, team, &borrowed);
  if (!atom.enter()) return;
  snac::direct_sum(atom, launch.call);
  atom.leave();
}

// Sums of the dtypes that models are made of have kernels of their own where all lies in one stretch; all others share one.
template <Dtype dtype, int ranks>
__global__ void __launch_bounds__(block_threads, 1) direct_sums_of(const __grid_constant__ Launches<ranks> all) {
  direct_sums<Adds<dtype, false>, true>(all);
}
template <int ranks>
__global__ void __launch_bounds__(block_threads, 1) direct_sums_any(const __grid_constant__ Launches<ranks> all) {
  direct_sums<AddsAny, false>(all);
}

template <int ranks>
const void* direct_sums_for(const Call& call) {
  if (call.flat && !is_extreme(call.sum.op)) {
    switch (call.sum.dtype) {
      case Dtype::float32: return reinterpret_cast<const void*>(direct_sums_of<Dtype::float32, ranks>);
      case Dtype::float16: return reinterpret_cast<const void*>(direct_sums_of<Dtype::float16, ranks>);
      case Dtype::bfloat16: return reinterpret_cast<const void*>(direct_sums_of<Dtype::bfloat16, ranks>);
      default: break;
    }
  }
  return reinterpret_cast<const void*>(direct_sums_any<ranks>);
}
Choice direct_sums(const Call& call, int ranks) {
  const void* kernel = ranks == 1   ? direct_sums_for<1>(call)
                       : ranks == 2 ? direct_sums_for<2>(call)
                                    : direct_sums_for<most_fused>(call);
  return {kernel, block_threads, 0};
}

}  // namespace purlin::gpu
