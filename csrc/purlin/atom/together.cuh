// Together: all lanes of a block in lockstep, for direct calls: one message a peer is all there is. A team has one such block, or one a role.
#pragma once
#include "ahead.cuh"
#include "tally.cuh"

namespace purlin::gpu {

template <bool all_flat, int threads = block_threads>
class Together : public NoPackets {
 public:
  static constexpr bool flat = all_flat;

  __device__ Together(const Launch& launch, int team, int role = every) : l_(launch), team_(team), role_(role) {}

  __device__ int team() const { return team_; }
  __device__ int teams() const { return l_.call.teams; }
  // All that memory knows is asked for at once, and waited for where it is used. So a dead communicator is noticed where lanes first come together.
  __device__ bool enter() {
    const Call& c = l_.call;
    if (lane() == static_cast<int>(blockDim.x) - 1) poison_ = ptx::load_relaxed(poison_of(c, c.rank));
    if (int p = lane() % warp; p < c.peers()) {
      Counts& count = c.count(p, team_);
      sent_ = *count.sent_on(Use::direct);
      taken_ = *count.taken_on(Use::direct);
    }
    return true;
  }
  __device__ void leave() const {
    if (lane() == 0 && team_ == 0 && role_ != stages)
      atomicAdd(&l_.call.progress->calls, Word{1});  // nobody waits for it
  }
  // Asked by lane p of a warp for peer p.
  __device__ Word sent(Use, int) const { return sent_; }
  __device__ Word taken(Use, int) const { return taken_; }

  // What a call counts is read by the next one alone: it is kept, by a warp that has little else to do, while others wait.
  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    if (role_ != stages) consume.open();
    if (role_ != consumes) {
      stage.open();
      await_sent();
      stage.step(0);
      held_.forget();  // what the same lanes copy next is another role's
      stage.close();
    }
    if (role_ != stages) {
      consume.close();
      consume.step(0);
    }
  }
  // So that between a grant and the first store nothing is left to be loaded.
  __device__ void ahead(const Place& from, Range range) {
    if constexpr (all_flat) held_.read_ahead(from.first + range.lo, range.hi - range.lo, copiers());
  }
  __device__ void copy(const Place& to, const Place& from, Range range) {
    if constexpr (all_flat) {
      held_.copy(to.first + range.lo, from.first + range.lo, range.hi - range.lo, copiers());
    } else {
      gpu::copy(to, from, range, copiers());
    }
  }
  template <class F>
  __device__ void notify(int n, F mark) {
    __syncthreads();
    store_marks(n, mark, lane(), ptx::store_release);
  }
  template <class F>
  __device__ void lend(int n, F line) {
    __syncthreads();
    store_grants(n, line, lane(), ptx::store_line_release);
  }
  // What nobody here waits for is told by the second warp, while the first waits for others.
  template <class F>
  __device__ void tell(int n, F mark) {
    store_marks(n, mark, lane() - warp, ptx::store_relaxed);
  }
  template <class F>
  __device__ void grant(int n, F line) {
    store_grants(n, line, lane() - warp, ptx::store_line);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    store_marks(n, mark, lane() - from_last(2), keep_word);
  }
  template <class F>
  __device__ Arrival wait(int n, F mark, Where where) {
    return verdict(lane() < n && !reached(l_, team_, mark(ptx::here(lane())), lane(), where));
  }
  template <class F>
  __device__ Arrival expect(int n, F mark, Where where) {
    int peers = l_.call.peers(), first = 0;
    Arrival how;
    do {  // lane p knows the counts of peer p alone, so several marks a peer take turns
      int p = lane();
      how = verdict(p < peers && first + p < n && !tagged(l_, team_, mark(ptx::here(first + p)), p, where));
      first += peers;
    } while (how == Arrival::yes && first < n);
    return how;
  }
  __device__ void meet() const {}   // lanes in lockstep have
  __device__ void drain() const {}  // each step ends by itself

  // Rings: other Atoms. Sums: Borrow.
  template <class G, class C, class S>
  __device__ void three(int, G, C, S) {}
  template <class T, class F>
  __device__ void reduce(int, T, const Place&, int, F, int, Range, Sum) {}

 private:
  __device__ Arrival verdict(bool bad) {
    if (poison_ != 0) tell_host(l_, poison_), bad = true;
    return __syncthreads_or(bad) ? Arrival::never : Arrival::yes;
  }
  // Who looks for grants needs its count for that. Were it still on its way then, the lane would wait for all that it has asked for since.
  __device__ void await_sent() {
    if constexpr (all_flat) sent_ = __shfl_sync(0xffffffffu, sent_, lane() % warp);
  }
  __device__ int lane() const { return static_cast<int>(threadIdx.x); }
  // From the last lane on, for the first ones wait for others.
  __device__ Lanes copiers() const { return {threads - 1 - lane(), threads}; }
  // The first lane of a warp, the last one being the first from there.
  __device__ static int from_last(int warps) { return static_cast<int>(blockDim.x) - warps * warp; }

  const Launch& l_;
  int team_, role_;
  Word poison_ = 0, sent_ = 0, taken_ = 0;
  Held held_;
};

}  // namespace purlin::gpu
