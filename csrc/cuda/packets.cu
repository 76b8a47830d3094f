#include "../purlin/atom/packets.cuh"
#include "../purlin/snac.hpp"
#include "kernels.cuh"

namespace purlin::gpu {

template <bool flat, int ranks>
__global__ void __launch_bounds__(block_threads, 1) packets_kernel(const __grid_constant__ Launches<ranks> all) {
  auto [launch, team] = seat(all);
  Packets<flat> atom(launch, team, nullptr);
  if (!atom.enter()) return;
  snac::packets(atom, launch.call);
  atom.leave();
}

template <bool flat>
const void* packets_of(int ranks) {
  return by_ranks(ranks, packets_kernel<flat, 1>, packets_kernel<flat, 2>, packets_kernel<flat, most_fused>);
}
Choice packets(const Call& call, int ranks) {
  return {call.flat ? packets_of<true>(ranks) : packets_of<false>(ranks), block_threads, 0};
}

}  // namespace purlin::gpu
