// What a call is, after planning: plain data, the same for every Atom. Filled by the host once per signature; only tensor addresses change between calls.
#pragma once
#include "channel.hpp"
#include "moves.hpp"

namespace purlin {

enum class Kind { copy, reduce, all_reduce };  // numbers shared with purlin_core/moves.py
enum class Regime { staged, packet, direct };  // numbers shared with purlin_core/plan.py
enum class Op { sum, avg, max, min };
enum class Dtype { float32, float16, bfloat16, float64, int8, int16, int32, int64, uint8 };

struct Sum {
  Op op;
  Dtype dtype;
};

struct Pair {     // what this rank and one peer are to each other in a call
  Route send;     // my boxes that go to the peer
  Route remote;   // direct: where they lie in the peer's granted outputs; sums: my slice of what the peer lends
  Route receive;  // where the peer's bytes go in mine; for reductions only its size counts
  i64 reach;      // direct: bytes that the peer must have of each tensor it grants or lends
  unsigned send_signature, receive_signature;  // 24 bits over what the other side relies on
};

// peer p of rank r is rank (r + 1 + p) % ranks
struct Call {
  Kind kind;
  Regime regime;
  Sum sum;
  int rank, ranks, teams, lag, steps;
  int parts;       // blocks of a GPU that a team may have: 1, or one for each of its roles
  int grants;      // direct: tensors granted or lent
  bool onto_sent;  // a reduction writes where this rank reads what it sends: an all-reduce in one exchange, in place
  bool flat;       // all routes are
  bool even;       // all boxes begin, and all strides go, by multiples of 16 bytes; on a GPU all tensors here, too
  unsigned signature;  // 24 bits: the call as all ranks know it
  Geometry geometry;
  char* arena[max_ranks];  // by rank, as this rank sees them
  Counts* counts;          // private: [peers][counts_pitch], by team
  int counts_pitch;
  Progress* progress;  // private
  char* input[max_tensors];
  char* output[max_tensors];
  Route own_from, own_to;
  Pair pair[max_ranks - 1];

  PURLIN_FN int peers() const { return ranks - 1; }
  PURLIN_FN int rank_of(int peer) const {
    int r = rank + 1 + peer;
    return r < ranks ? r : r - ranks;
  }
  PURLIN_FN char* own_arena() const { return arena[rank]; }
  PURLIN_FN char* peer_arena(int peer) const { return arena[rank_of(peer)]; }
  PURLIN_FN int peer_of(int other) const { return other > rank ? other - rank - 1 : other - rank - 1 + ranks; }
  PURLIN_FN int peer_of_mark(int i) const {
    return i < peers() ? i : i % peers();
  }  // peer by peer, and so on from the first
  // As the peer counts its peers, which one am I?
  PURLIN_FN int as_seen_by(int peer) const { return ranks - 2 - peer; }
  PURLIN_FN Counts& count(int peer, int team) const { return counts[peer * counts_pitch + team]; }
};

}  // namespace purlin
