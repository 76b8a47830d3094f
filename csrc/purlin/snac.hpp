// Stage, Notify, And Consume: the one protocol under every collective. It knows no hardware; an Atom moves the bytes.
//
//   source:  wait until `freed` says the slot is free  ->  STAGE the chunk into it  ->  NOTIFY: store the slot's tag
//   reader:  wait until the slot's tag is this message's  ->  AND CONSUME: copy or reduce to the output  ->  say that it is free
//
// A rank reads its own memory, and an output lent to it for this very call. It writes its own, and at a peer only slots that are free, words of which it is
// the one writer, and an output granted or lent for this very call. In step i a team stages message i to every reader that still has bytes, then consumes message i - lag from every source that still
// has bytes: every wait refers to an earlier (step, phase), so no cycle can form. csrc/README.md has the proofs.
#pragma once
#include "snac/direct_sums.hpp"
#include "snac/packets.hpp"
#include "snac/staged.hpp"

namespace purlin::snac {

template <Atom A>
PURLIN_FN void packets(A& a, const Call& c) {
  a.both(0, ConsumePackets<A>{a, c}, StagePackets<A>{a, c});
}
template <Atom A>
PURLIN_FN void direct(A& a, const Call& c) {
  a.both(0, ConsumeDirect<A>{a, c}, StageDirect<A>{a, c});
}
template <Atom A>
PURLIN_FN void direct_sum(A& a, const Call& c) {
  a.both(0, ConsumeSums<A>{a, c}, StageSums<A>{a, c});
}
template <Atom A>
PURLIN_FN void staged_copy(A& a, const Call& c, AtHome at_home) {
  Consume<A> consume{a, c, Use::ring, at_home};
  if (at_home == AtHome::apart) {
    a.three(c.lag, CopyOwn<A>{a, c}, consume, Stage<A>{a, c});
  } else {
    a.both(c.lag, consume, Stage<A>{a, c});
  }
}
// The hands that stage, and those that gather, may be others than those that add.
template <Atom A, Atom B, Atom C>
PURLIN_FN void staged_sum(A& adding, B& staging, C& gathering, const Call& c) {
  if (c.kind == Kind::reduce) {
    adding.both(c.lag, Reduce<A>{adding, c}, Stage<B>{staging, c});
  } else {
    adding.three(c.lag, Gather<C>{gathering, c}, Spread<A>{adding, c}, Stage<B>{staging, c});
  }
}

template <Atom A>
PURLIN_FN void run(A& a, const Call& c) {
  if (!a.enter()) return;
  switch (c.regime) {
    case Regime::packet: packets(a, c); break;
    case Regime::direct: c.kind == Kind::copy ? direct(a, c) : direct_sum(a, c); break;
    case Regime::staged: c.kind == Kind::copy ? staged_copy(a, c, home_of(c.parts)) : staged_sum(a, a, a, c); break;
  }
  a.leave();
}

}  // namespace purlin::snac
