#include "../purlin/snac.hpp"
#include "rings.cuh"

namespace purlin::gpu {

constexpr int plain_threads = Plain<Copies>::role_threads;

template <int ranks>
__global__ void __launch_bounds__(2 * plain_threads, 1) staged_kernel(const __grid_constant__ Launches<ranks> all) {
  by_apart<Copies>(all, [](auto& hands, const Call& call) { snac::staged_copy(hands, call, snac::AtHome::consumer); });
}
template <int ranks>
__global__ void __launch_bounds__(2 * relay_threads, 1)
    staged_bulk_kernel(const __grid_constant__ Launches<ranks> all) {
  extern __shared__ __align__(128) char memory[];
  by_relay<Order::by_role>(all, memory, [](auto& hands, const Call& call, int parts) {
    snac::staged_copy(hands, call, snac::home_of(parts));
  });
}

Choice staged(const Call& call, int ranks, bool bulk) {
  if (bulk)
    return relayed(by_ranks(ranks, staged_bulk_kernel<1>, staged_bulk_kernel<2>, staged_bulk_kernel<most_fused>),
                   call.parts);
  return side_by_side(by_ranks(ranks, staged_kernel<1>, staged_kernel<2>, staged_kernel<most_fused>), plain_threads,
                      plain_threads, 0, smaller(call.parts, 2));
}

}  // namespace purlin::gpu
