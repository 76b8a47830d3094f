#include "../purlin/atom/borrow.cuh"
#include "../purlin/snac.hpp"
#include "kernels.cuh"

namespace purlin::gpu {

template <class Adding, bool flat, int threads, int ranks>
__device__ __forceinline__ void direct_sums(const Launches<ranks>& all) {
  __shared__ Borrowed borrowed;
  auto [launch, team] = seat(all);
  Borrow<flat, Adding, threads> atom(launch, team, &borrowed);
  if (!atom.enter()) return;
  snac::direct_sum(atom, launch.call);
  atom.leave();
}

// Sums of the dtypes that models are made of have kernels of their own where all lies in one stretch; all others share one.
template <Dtype dtype, int ranks>
__global__ void __launch_bounds__(block_threads, 1) direct_sums_of(const __grid_constant__ Launches<ranks> all) {
  direct_sums<Adds<dtype, false>, true, block_threads>(all);
}
constexpr int any_threads = 256;  // that registers suffice for every dtype
template <int ranks>
__global__ void __launch_bounds__(any_threads, 1) direct_sums_any(const __grid_constant__ Launches<ranks> all) {
  direct_sums<AddsAny, false, any_threads>(all);
}

template <Dtype dtype, int ranks>
Choice direct_sums_as() {
  return {reinterpret_cast<const void*>(direct_sums_of<dtype, ranks>), block_threads, 0};
}
template <int ranks>
Choice direct_sums_for(const Call& call) {
  if (call.flat && !is_extreme(call.sum.op)) {
    switch (call.sum.dtype) {
      case Dtype::float32: return direct_sums_as<Dtype::float32, ranks>();
      case Dtype::float16: return direct_sums_as<Dtype::float16, ranks>();
      case Dtype::bfloat16: return direct_sums_as<Dtype::bfloat16, ranks>();
      default: break;
    }
  }
  return {reinterpret_cast<const void*>(direct_sums_any<ranks>), any_threads, 0};
}
Choice direct_sums(const Call& call, int ranks) {
  if (ranks == 1) return direct_sums_for<1>(call);
  return ranks == 2 ? direct_sums_for<2>(call) : direct_sums_for<most_fused>(call);
}

}  // namespace purlin::gpu
