// Kernels that dawdle, to be included before any file of csrc/cuda (nvcc -include): before each operation of the protocol a team may be made to wait,
// as a whole or one warp of it. Whom, where and how long follows from the number of the call, so that in many calls every rank is late everywhere. With
// PURLIN_LATE=reduce (or another act) a warp of one rank is late in every call, each time before that act and before no other.
#pragma once
#include "purlin/atom/packets.cuh"
#include "purlin/atom/together.cuh"
#include "purlin/snac.hpp"

namespace purlin::late {

enum class Act { put, take, copy, reduce, notify, tell, grant, lend, keep, wait, expect, meet };
constexpr unsigned acts = 12, turns = 3;
#ifdef PURLIN_LATE
constexpr unsigned named = static_cast<unsigned>(Act::PURLIN_LATE);
#else
constexpr unsigned named = acts;
#endif

__device__ __forceinline__ unsigned mixed(unsigned x) {  // of its bits, all
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// An Atom's hands, with delays.
template <class A>
class Late {
 public:
  static constexpr bool flat = A::flat;

  __device__ Late(A& atom, const Call& c) : a_(atom) {
    unsigned call = static_cast<unsigned>(c.progress->calls), draw = mixed(call * 2654435761u + 97);
    unsigned warps = blockDim.x / 32, warp = threadIdx.x / 32, victim = draw >> 4 & 3;
    bool here = static_cast<int>((draw >> 8) % static_cast<unsigned>(c.ranks)) == c.rank;
    // One of the first warps or of the last, as a rule: short messages are theirs alone.
    unsigned nth = mixed(draw) % (1 + mixed(draw + 1) % warps), one = draw & 1 ? nth : warps - 1 - nth;
    bool lone = named < acts || victim == 1;
    here = here && (lone ? warp == one : victim != 0);
    act_ = !here ? acts : named < acts ? named : (draw >> 12) % acts;
    turn_ = named < acts ? turns : (draw >> 16) % (turns + 1);  // turns: each time
    cycles_ = 1000ll << (draw >> 20) % 6;
  }

  __device__ int team() const { return a_.team(); }
  __device__ int teams() const { return a_.teams(); }
  __device__ Word sent(Use use, int peer) const { return a_.sent(use, peer); }
  __device__ Word taken(Use use, int peer) const { return a_.taken(use, peer); }
  __device__ bool enter() { return a_.enter(); }
  __device__ void leave() { a_.leave(); }

  template <class C, class S>
  __device__ void both(int lag, C consume, S stage) {
    a_.both(lag, consume, stage);
  }
  template <class G, class C, class S>
  __device__ void three(int lag, G gather, C consume, S stage) {
    a_.three(lag, gather, consume, stage);
  }
  __device__ void ahead(const Place& from, Range range) { a_.ahead(from, range); }
  __device__ void copy(const Place& to, const Place& from, Range range) {
    before(Act::copy);
    a_.copy(to, from, range);
  }
  template <class T, class F>
  __device__ void reduce(int places, T to, const Place& own, int n, F slot, int self, Range range, Sum sum) {
    before(Act::reduce);
    a_.reduce(places, to, own, n, slot, self, range, sum);
  }
  template <class C, class S, class W>
  __device__ Arrival put(int n, C credit, S source, W window, Where where) {
    before(Act::put);
    return a_.put(n, credit, source, window, where);
  }
  template <class F>
  __device__ Arrival take(int n, F packet, Where where) {
    before(Act::take);
    return a_.take(n, packet, where);
  }
  template <class F>
  __device__ Arrival take_reduce(const Place& to, const Place& own, int n, F packet, int self, Sum sum, Where where) {
    before(Act::take);
    return a_.take_reduce(to, own, n, packet, self, sum, where);
  }
  template <class F>
  __device__ void notify(int n, F mark) {
    before(Act::notify);
    a_.notify(n, mark);
  }
  template <class F>
  __device__ Arrival wait(int n, F mark, Where where) {
    before(Act::wait);
    return a_.wait(n, mark, where);
  }
  template <class F>
  __device__ Arrival expect(int n, F mark, Where where) {
    before(Act::expect);
    return a_.expect(n, mark, where);
  }
  template <class F>
  __device__ void tell(int n, F mark) {
    before(Act::tell);
    a_.tell(n, mark);
  }
  template <class F>
  __device__ void grant(int n, F line) {
    before(Act::grant);
    a_.grant(n, line);
  }
  template <class F>
  __device__ void lend(int n, F line) {
    before(Act::lend);
    a_.lend(n, line);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    before(Act::keep);
    a_.keep(n, mark);
  }
  __device__ void meet() {
    before(Act::meet);
    a_.meet();
  }
  __device__ void drain() { a_.drain(); }

 private:
  __device__ __forceinline__ void before(Act act) {
    if (static_cast<unsigned>(act) != act_) return;
    if (unsigned turn = count_++ % turns; turn_ != turns && turn != turn_) return;
    for (long long start = clock64(); clock64() - start < cycles_;) {}
  }

  A& a_;
  unsigned act_, turn_, count_ = 0;
  long long cycles_;
};

using snac::AtHome, snac::home_of;

template <class A>
__device__ void packets(A& a, const Call& c) {
  Late<A> late(a, c);
  snac::packets(late, c);
}
template <class A>
__device__ void direct(A& a, const Call& c) {
  Late<A> late(a, c);
  snac::direct(late, c);
}
template <class A>
__device__ void direct_sum(A& a, const Call& c) {
  Late<A> late(a, c);
  snac::direct_sum(late, c);
}
template <class A>
__device__ void staged_copy(A& a, const Call& c, AtHome at_home) {
  Late<A> late(a, c);
  snac::staged_copy(late, c, at_home);
}
template <class A, class B, class C>
__device__ void staged_sum(A& adding, B& staging, C& gathering, const Call& c) {
  Late<A> late_adding(adding, c);
  Late<B> late_staging(staging, c);
  Late<C> late_gathering(gathering, c);
  snac::staged_sum(late_adding, late_staging, late_gathering, c);
}

// Late is an Atom wherever what it holds is.
static_assert(Atom<Late<gpu::Packets<true>>> && Atom<Late<gpu::Together<true>>>);

}  // namespace purlin::late

#define snac late  // what kernels call
