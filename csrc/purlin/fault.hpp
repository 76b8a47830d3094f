// What is left of a call that failed: enough for a host to name who waited for whom, and nothing that grows.
#pragma once
#include "atom/concept.hpp"

namespace purlin {

enum class Fault { none, stall, mismatch, grant, left, died, interrupted };

// A poison word: {1 : 1, fault : 8, rank that found it : 8, rank it is about : 8}. Zero: all is well; the first one stays.
struct Poison {
  Fault fault;
  int by, about;
};
PURLIN_FN Word encode(Poison p) {
  return 1ull << 63 | static_cast<Word>(p.fault) << 16 | static_cast<Word>(p.by) << 8 | static_cast<Word>(p.about);
}
PURLIN_FN Poison decode(Word w) {
  return {static_cast<Fault>(w >> 16 & 0xff), static_cast<int>(w >> 8 & 0xff), static_cast<int>(w & 0xff)};
}

struct Record {  // which wait of this rank failed
  Where where;
  int team, peer;
};

constexpr Word farewell = ~Word{0};  // the post of a rank that has left: it will be in no further call

// Is a peer whose latest post is `post` in another call than this one, or past it? Then what is missing will never come.
PURLIN_FN bool elsewhere(Word post, Word calls, unsigned signature) {
  i64 ahead = static_cast<i64>((number_of(post) - calls) << signature_bits) >> signature_bits;
  return ahead > 0 || (ahead == 0 && signature_of(post) != (signature & signature_mask));
}

}  // namespace purlin
