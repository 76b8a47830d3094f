// Flat bytes copied in rounds of as many vectors as the lanes hold in registers. The first round of a copy may be read long before it is stored: while
// the lanes wait for leave to store it. All copies share the registers, for what is loaded under a condition takes its own from the kernel's beginning on.
#pragma once
#include "lanes.cuh"

#include <type_traits>

namespace purlin::gpu {

// What a lane moves at once.
using Vector = std::conditional_t<has_wide, ptx::Wide, uint4>;
constexpr i64 held_bytes = sizeof(Vector);

class Held {
 public:
  // The first round of these bytes, for all copies that begin with it until it is forgotten; nothing where they do not lie in vectors, or others are held.
  __device__ __forceinline__ void read_ahead(const char* from, i64 bytes, Lanes team) {
    if (ahead_ || bits(from) % held_bytes != 0) return;
    read(from, round_of(bytes, team), team);
    ahead_ = from;
  }
  __device__ __forceinline__ void forget() { ahead_ = nullptr; }

  __device__ __forceinline__ void copy(char* to, const char* from, i64 bytes, Lanes team) {
    if (to == from) return;
    if ((bits(to) | bits(from)) % held_bytes != 0)
      return has_wide ? copy_called(to, from, bytes, team) : copy_spliced(to, from, bytes, team);
    i64 whole = bytes & ~(held_bytes - 1), round = many * team.lanes * held_bytes, at = 0;
    int vectors = round_of(whole, team);
    if (from != ahead_ || vectors != vectors_) read(from, vectors, team), forget();
    if (whole > round) forget();
#pragma unroll 1
    for (; at + 2 * round <= whole; at += round) exchange(to + at, from + at + round, team);
    if (at + round < whole) {
      store(to + at, team);
      at += round;
      read(from + at, round_of(whole - at, team), team);
    }
    store(to + at, team);
    if (i64 last = whole + team.lane; last < bytes) to[last] = from[last];
  }

 private:
  static constexpr int many = has_wide ? 3 : in_flight;  // four wide ones do not find registers

  __device__ __forceinline__ static int round_of(i64 bytes, Lanes team) {
    return static_cast<int>(smaller(bytes, many * team.lanes * held_bytes)) / static_cast<int>(held_bytes);
  }
  __device__ __forceinline__ void read(const char* from, int vectors, Lanes team) {
    vectors_ = vectors;
    for_each_vector(from, team, [&](int u, const char* at) { ptx::load(held_[u], at); });
  }
  __device__ __forceinline__ void store(char* to, Lanes team) const {
    for_each_vector(to, team, [&](int u, char* at) { ptx::store(at, held_[u]); });
  }
  // Of whole rounds: as soon as a vector is stored, that of the next round is asked for.
  __device__ __forceinline__ void exchange(char* to, const char* next, Lanes team) {
    i64 mine = team.lane * held_bytes;
    to = ptx::here(to + mine), next = ptx::here(next + mine);
#pragma unroll
    for (int u = 0; u < many; ++u) {
      ptx::store(to + u * team.lanes * held_bytes, held_[u]);
      ptx::load(held_[u], next + u * team.lanes * held_bytes);
    }
  }
  // f(u, at) for each vector of this lane, of a round that begins at `first`. What is one vector a lane passes all others by.
  template <class C, class F>
  __device__ __forceinline__ void for_each_vector(C* first, Lanes team, F f) const {
    C* mine = ptx::here(first + team.lane * held_bytes);
    int left = vectors_ - team.lane;
    if (left > 0) f(0, mine);
    if (vectors_ <= team.lanes) return;
#pragma unroll
    for (int u = 1; u < many; ++u)
      if (left > u * team.lanes) f(u, mine + u * team.lanes * held_bytes);
  }

  const char* ahead_ = nullptr;  // where the round begins that has been read ahead; nullptr: none has
  int vectors_ = 0;              // of the round
  Vector held_[many];            // [u] vector u * lanes + lane of the round
};

}  // namespace purlin::gpu
