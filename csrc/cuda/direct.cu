#include "../purlin/atom/together.cuh"
#include "../purlin/snac.hpp"
#include "rings.cuh"

namespace purlin::gpu {

// Bytes a team from which on bulk copies carry boxes; second: where what stays at home has blocks of its own. One stretch lanes carry as fast, and begin sooner.
constexpr i64 bulk_from = 64 << 10, bulk_apart_from = 128 << 10;

template <bool flat, int ranks>
__global__ void __launch_bounds__(block_threads, 1) direct_kernel(const __grid_constant__ Launches<ranks> all) {
  auto [launch, parts, team, role, thread] = part<block_threads, block_threads, Order::by_team>(all);
  Together<flat> atom(launch, team, parts == 1 ? every : role);
  if (!atom.enter()) return;
  snac::direct(atom, launch.call);
  atom.leave();
}

template <int ranks>
__global__ void __launch_bounds__(2 * relay_threads, 1)
    direct_bulk_kernel(const __grid_constant__ Launches<ranks> all) {
  extern __shared__ __align__(128) char memory[];
  by_relay<Order::by_team>(all, memory, [](auto& hands, const Call& call, int) { snac::direct(hands, call); });
}

template <bool flat>
const void* direct_of(int ranks) {
  return by_ranks(ranks, direct_kernel<flat, 1>, direct_kernel<flat, 2>, direct_kernel<flat, most_fused>);
}
Choice direct(const Call& call, int ranks, bool bulk) {
  i64 most = 0;
  for (int p = 0; p < call.peers(); ++p)
    most = larger(most, larger(call.pair[p].send.bytes, call.pair[p].receive.bytes));
  if (bulk && !call.flat && most / call.teams >= (call.parts == 2 ? bulk_apart_from : bulk_from))
    return relayed(by_ranks(ranks, direct_bulk_kernel<1>, direct_bulk_kernel<2>, direct_bulk_kernel<most_fused>),
                   call.parts);
  return {call.flat ? direct_of<true>(ranks) : direct_of<false>(ranks), block_threads, 0, call.parts};
}

}  // namespace purlin::gpu
