// What every call does whatever its regime: it says that it has begun, and it moves what stays at home.
#pragma once
#include "../atom/concept.hpp"

namespace purlin::snac {

template <class A>
PURLIN_FN void copy_own(A& a, const Call& c, int step) {
  Range range = c.own_from.range(step, a.team(), a.teams());
  if (c.kind == Kind::copy && !range.empty())
    a.copy(in_tensors<A::flat>(c.own_to, c.output), in_tensors<A::flat>(c.own_from, c.input), range);
}

// What every call says on entry, by the reader: I am in call n of this signature.
template <class A>
PURLIN_FN void announce(A& a, const Call& c) {
  if (a.team() != 0) return;
  a.tell(c.peers(), [&](int p) {
    return Mark{Inbox{c.geometry, c.peer_arena(p)}.post(c.as_seen_by(p)), tag(c.progress->calls, c.signature)};
  });
}

}  // namespace purlin::snac
