// What the hands of rings have in common: how a call begins and ends, its counts, kept near, and what they leave to others.
#pragma once
#include "block.cuh"

namespace purlin::gpu {

// The counts of a team at entry, in shared memory: a lane that acquires empties the cache that they would lie in.
class Tally {
 public:
  __device__ void read(const Call& c, int team) {
    constexpr int words = sizeof(Counts) / sizeof(Word);
    for (int k = static_cast<int>(threadIdx.x); k < c.peers() * words; k += static_cast<int>(blockDim.x))
      reinterpret_cast<Word*>(of_)[k] = reinterpret_cast<const Word*>(&c.count(k / words, team))[k % words];
  }
  __device__ Word sent(Use use, int peer) const { return of_[peer].sent[static_cast<int>(use)]; }
  __device__ Word taken(Use use, int peer) const { return of_[peer].taken[static_cast<int>(use)]; }

 private:
  Counts of_[max_ranks - 1];
};

// All lanes of a block: false when the communicator is dead, which the host is told.
__device__ __forceinline__ bool is_alive(const Launch& l) {
  Word poison = threadIdx.x == 0 ? ptx::load_relaxed(poison_of(l.call, l.call.rank)) : 0;
  if (poison != 0) tell_host(l, poison);
  return !__syncthreads_or(poison != 0);
}

// Of a team. idle: threads that a block has beyond what its role needs; every: all of them, by the same lanes.
enum Role { stages, consumes, gathers, idle, every };

class RingHands : public NoPackets {
 public:
  static constexpr bool flat = false;

  __device__ int team() const { return team_; }
  __device__ int teams() const { return l_.call.teams; }
  __device__ Word sent(Use use, int peer) const { return tally_->sent(use, peer); }
  __device__ Word taken(Use use, int peer) const { return tally_->taken(use, peer); }
  __device__ bool enter() const { return is_alive(l_); }
  __device__ void leave() const {
    __syncthreads();
    if (counts_) l_.call.progress->calls += 1;
  }

  template <class C, class S>
  __device__ void both(int, C consume, S stage) {
    if (role_ == stages) {
      play(stage);
    } else if (role_ == consumes) {
      play(consume);
    }
  }
  // Whoever gathers with the hands that consume does so in one crew with them, which takes turns.
  template <class G, class C, class S>
  __device__ void three(int lag, G gather, C consume, S stage) {
    if (role_ == stages) {
      play(stage);
    } else if constexpr (std::is_same_v<decltype(gather.a), decltype(consume.a)>) {
      if (role_ == consumes) play_in_turn(lag, gather, consume);
    } else if (role_ == consumes) {
      play(consume);
    } else if (role_ == gathers) {
      play(gather);
    }
  }
  __device__ void meet() const {}  // the roles of a ring tell each other by words

  __device__ void ahead(const Place&, Range) const {}  // of who waits for grants, who loads is ahead as it is
  template <class F>
  __device__ void lend(int, F) const {}  // Borrow

 protected:
  __device__ RingHands(const Launch& launch, int team, int role, int thread, const Tally* tally)
      : l_(launch), team_(team), role_(role), counts_(role == consumes && team == 0 && thread == 0), tally_(tally) {}

  const Launch& l_;
  int team_, role_;

 private:
  bool counts_;  // the call, when it ends
  const Tally* tally_;
};

}  // namespace purlin::gpu
