#include "../purlin/atom/packets.cuh"
#include "../purlin/snac.hpp"
#include "kernels.cuh"

namespace purlin::gpu {

template <class Adding, bool flat, int ranks>
__device__ __forceinline__ void packet_sums(const Launches<ranks>& all) {
  __shared__ Incoming incoming;
  auto [launch, team] = seat(all);
  Packets<flat, Adding> atom(launch, team, &incoming);
  if (!atom.enter()) return;
  snac::packets(atom, launch.call);
  atom.leave();
}

// Sums of the dtypes that models are made of have kernels of their own, for their latency counts; all others share one.
template <Dtype dtype, bool flat, int ranks>
__global__ void __launch_bounds__(block_threads, 1) packet_sums_of(const __grid_constant__ Launches<ranks> all) {
  packet_sums<Adds<dtype, false>, flat>(all);
}
template <int ranks>
__global__ void __launch_bounds__(block_threads, 1) packet_sums_any(const __grid_constant__ Launches<ranks> all) {
  packet_sums<AddsAny, false>(all);
}

template <Dtype dtype, int ranks>
const void* kernel_of(bool flat) {
  return flat ? reinterpret_cast<const void*>(packet_sums_of<dtype, true, ranks>)
              : reinterpret_cast<const void*>(packet_sums_of<dtype, false, ranks>);
}
template <int ranks>
const void* kernel_for(const Call& call) {
  if (!is_extreme(call.sum.op)) {
    switch (call.sum.dtype) {
      case Dtype::float32: return kernel_of<Dtype::float32, ranks>(call.flat);
      case Dtype::float16: return kernel_of<Dtype::float16, ranks>(call.flat);
      case Dtype::bfloat16: return kernel_of<Dtype::bfloat16, ranks>(call.flat);
      default: break;
    }
  }
  return reinterpret_cast<const void*>(packet_sums_any<ranks>);
}
Choice packet_sums(const Call& call, int ranks) {
  return {ranks == 1 ? kernel_for<1>(call) : kernel_for<most_fused>(call), block_threads, 0};
}

}  // namespace purlin::gpu
