// What SNAC asks of hardware. An Atom is one team's hands: it moves bytes, publishes words and waits for them, with what one kind of machine offers.
//
// All lanes of a role call every operation with the same arguments; functions of a peer p in [0, n) are evaluated by the lane that looks after it.
//   R1  Operations are started, not done. Within a role, copies, reductions, puts, notifies and lends take effect in order.
//   R2  What a role moved need not be visible to a peer before the notify or lend that follows it; then it is.
//   R3  What is started is performed in bounded time whatever the role does next; wait, expect, take and drain push it out. Pushing never blocks on a peer.
//   R4  After wait or expect, all later operations of the role see what the word published, but for what `ahead` has said that they read; a packet
//       publishes its payload and nothing else.
//   R5  A tag of another signature ends a wait at once, whatever the other peers do. After anything but Arrival::yes the role starts nothing more;
//       drain still completes.
//   R6  The roles of a team share no variable. Two of them wait for each other in meet(), and one may wait for a word that another has notified, in the
//       same step or an earlier one.
#pragma once
#include "../spec.hpp"

#include <concepts>

namespace purlin {

enum class Arrival { yes, other, never };  // all came | a message of another call | deadline or abort

struct Mark {  // for one peer
  Word* word;  // nullptr: nothing for this peer
  Word value;
};
struct GrantMark {
  Grant* line;  // nullptr: nothing for this peer
  Grant value;
};
struct Bytes {
  Place place;  // where they come from, or go to
  Range range;  // empty: nothing for this peer
};
struct Lines {
  char* window;
  Word tag;
};
struct Packet {
  char* window;  // nullptr: nothing for this peer
  Word tag;
  Place place;
  Range range;
};
// What a wait is about, for the record of a stall. home: that this rank itself has staged what it is about to overwrite.
struct Where {
  enum class What { credit, message, grant, home } what;
  Use use;
  int step;
};

namespace concepts {  // the weakest arguments an Atom must take
struct Role {
  PURLIN_FN void open() {}
  PURLIN_FN int steps() const { return 0; }
  PURLIN_FN void step(int) {}
  PURLIN_FN void close() {}
};
struct Marks {
  PURLIN_FN Mark operator()(int) const { return {}; }
};
struct Grants {
  PURLIN_FN GrantMark operator()(int) const { return {}; }
};
struct Packets {
  PURLIN_FN Packet operator()(int) const { return {}; }
};
struct Sources {
  PURLIN_FN Bytes operator()(int) const { return {}; }
};
struct Windows {
  PURLIN_FN Lines operator()(int) const { return {}; }
};
struct Slots {
  PURLIN_FN const char* operator()(int) const { return nullptr; }
};
struct Places {
  PURLIN_FN Place operator()(int) const { return {}; }
};
}  // namespace concepts

// clang-format off
template <class A>
concept Atom = requires(A a, int n, Place place, Range range, Sum sum, Where where, concepts::Role role,
                        concepts::Marks mark, concepts::Grants line, concepts::Packets packet, concepts::Sources source,
                        concepts::Windows window, concepts::Slots slot, concepts::Places to) {
  { A::flat } -> std::convertible_to<bool>;           // of this Atom's calls all routes are flat
  a.team();
  a.teams();
  a.sent(Use::ring, n);                               // this team's count of messages staged for peer n, as it was at entry
  a.taken(Use::ring, n);                              // and of messages of peer n consumed
  a.enter();                                          // false: poisoned, the call does nothing
  a.leave();                                          // after both roles have closed

  // Run a consuming and a staging role, side by side or in lockstep with consume.step n behind: each opens (consume
  // first), takes its steps, drains, closes.
  a.both(n, role, role);
  // The same with a third role, which in lockstep is n steps behind the one that consumes: gathering, consuming, staging.
  a.three(n, role, role, role);
  // Start: the wire bytes of `range`, to a place, from a place.
  a.copy(place, place, range);
  // A hint, ahead of a wait: copies from this place and range follow in this step. What they send may be read once for all
  // of them, from here on. There may be several.
  a.ahead(place, range);
  // Start: how many places, to(k) the k-th; my contribution, contributions, slot(k) of the k-th but mine, my k; added in
  // rank order. The sum goes to all places.
  a.reduce(n, to, place, n, slot, n, range, sum);

  // Acquire until *word >= value for every peer (the credit), then start: payload and tag in each line, so no notify
  // follows. The sources may be read before.
  a.put(n, mark, source, window, where);
  a.take(n, packet, where);                           // wait for each packet of a peer and copy it out
  a.take_reduce(place, place, n, packet, n, sum, where);  // as reduce, of packets, to one place

  // Start: one release at system scope after all this role started, then *word = value for every peer.
  // Of up to two words a peer.
  a.notify(n, mark);
  a.lend(n, line);  // the same of one line of 16 bytes a peer
  a.wait(n, mark, where);                             // acquire until *word >= value for every peer
  // Acquire until number_of(*word) == number_of(value) for every peer; other: the signature differs. Of several marks a
  // peer, mark i is of peer c.peer_of_mark(i).
  a.expect(n, mark, where);

  a.tell(n, mark);   // in open() only: *word = value; the boundary between two calls orders it, no fence
  a.grant(n, line);  // in open() only: one store of 16 bytes
  a.keep(n, mark);   // in close() only: *word = value in this rank's private memory
  a.meet();          // both roles have come here, and what either started before has read its sources
  a.drain();         // all that this role started is performed; also after an abort
};
// clang-format on

}  // namespace purlin
