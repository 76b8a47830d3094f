// What the ranks of a test do: a schedule of random calls, the same for all of them, or with one call in which one rank disagrees about one thing.
#pragma once
#include "world.hpp"

namespace purlin::test {

constexpr int program_ranks = 4;

struct Disagreement {
  int rank = -1, call = 0;  // rank < 0: none
  const char* field = "";
};

struct Program {  // what the ranks do
  Setting setting{};
  std::vector<std::unique_ptr<Built>> plans;
  std::vector<std::vector<int>> schedule;  // plans, by rank
  Disagreement odd;
};

inline int plan(Program& p, const Shape& shape) {
  p.plans.push_back(Builder(shape, p.setting.limits, Wires::loose).build());
  return static_cast<int>(p.plans.size()) - 1;
}

inline void change(Random& random, Shape& s, const Limits& limits, const char*& field) {
  s.signature ^= 1u + static_cast<unsigned>(random.below(signature_mask));
  switch (random.below(5)) {
    case 0:
      field = "kind";
      if (s.regime == Regime::direct) s.regime = Regime::staged;
      s.kind = static_cast<Kind>((static_cast<int>(s.kind) + 1) % 3);
      s.unit = s.kind == Kind::copy ? s.unit : bytes_of(s.sum.dtype);
      break;
    case 1:
      field = "bytes";
      for (auto& row : s.elements) row[random.below(limits.ranks)] += random.between(1, 9);
      break;
    case 2:
      field = "teams";
      s.teams = s.teams % limits.teams + 1;
      break;
    case 3:
      field = "regime";
      s.regime = static_cast<Regime>((static_cast<int>(s.regime) + 1) % (s.kind == Kind::reduce ? 2 : 3));
      break;
    default: field = "signature";
  }
}

inline bool sends(const Program& p, int plan, int rank) {
  const Call& c = p.plans[static_cast<size_t>(plan)]->part[static_cast<size_t>(rank)].call;
  for (int k = 0; k < c.peers(); ++k)
    if (c.pair[k].send.bytes > 0) return true;
  return false;
}
inline bool receives(const Program& p, int plan, int rank) {
  const Built& b = *p.plans[static_cast<size_t>(plan)];
  const Call& c = b.part[static_cast<size_t>(rank)].call;
  for (int k = 0; k < c.peers(); ++k)
    if (b.part[static_cast<size_t>(c.rank_of(k))].call.pair[c.as_seen_by(k)].send.bytes > 0) return true;
  return false;
}

enum class Agree { yes, no };

inline Program draw_program(Random& random, Lines lines, Agree agree) {
  Program p;
  bool alone = agree == Agree::yes && random.chance(2);
  p.setting = draw_setting(random, alone ? 1 : static_cast<int>(random.between(2, program_ranks)), lines);
  int calls = static_cast<int>(random.between(2, 8)), only = random.chance(40) ? static_cast<int>(random.below(3)) : -1;
  i64 most_bytes = p.setting.limits.ranks == 2 ? 400 : 200;
  std::vector<int> all;
  for (int k = 0; k < calls; ++k) {
    if (k > 0 && random.chance(20)) {
      all.push_back(random.pick(all));  // the same call once more
      continue;
    }
    int regime = only >= 0 ? only : random.chance(50) ? 0 : static_cast<int>(random.below(3));
    all.push_back(plan(p, draw_shape(random, p.setting.limits, static_cast<Regime>(regime), most_bytes)));
  }
  p.schedule.assign(static_cast<size_t>(p.setting.limits.ranks), all);
  if (agree == Agree::yes) return p;
  p.odd.rank = static_cast<int>(random.below(p.setting.limits.ranks));
  p.odd.call = static_cast<int>(random.below(calls));
  std::vector<int>& mine = p.schedule[static_cast<size_t>(p.odd.rank)];
  size_t at = static_cast<size_t>(p.odd.call);
  if (random.chance(20) && at + 1 < mine.size() && mine[at] != mine[at + 1]) {
    p.odd.field = "order";
    std::swap(mine[at], mine[at + 1]);
  } else {
    Shape odd = p.plans[static_cast<size_t>(mine[at])]->shape;
    change(random, odd, p.setting.limits, p.odd.field);
    mine[at] = plan(p, odd);
  }
  return p;
}

// What a disagreement may not end in, when no rank reports a fault. Empty: it is all right.
inline std::string unnoticed(const Program& p, bool right) {
  if (!right) return "ranks disagree, the data are wrong, and nobody says so";
  if (p.odd.field == std::string("order")) return "";  // the two calls do not touch each other
  size_t at = static_cast<size_t>(p.odd.call);
  int others = p.schedule[p.odd.rank == 0 ? 1 : 0][at], mine = p.schedule[static_cast<size_t>(p.odd.rank)][at];
  if (!sends(p, others, p.odd.rank) && !receives(p, mine, p.odd.rank)) return "";  // nobody waits for anything
  return std::string("ranks disagree about ") + p.odd.field + " and nobody says so";
}

// A disagreement may come to light at the deadline only, if nobody waited for anything in the odd call itself: messages that nobody will take are left in
// its slots, the ranks agree again, and in some later call both sides of a pair wait for credit before they look at what has come. `at`: in which call of
// its schedule each rank is.
inline bool may_stall(const Program& p, const std::vector<size_t>& at) {
  for (size_t r = 0; r < at.size(); ++r)
    if (at[r] != at[0] || at[r] >= p.schedule[r].size() || p.schedule[r][at[r]] != p.schedule[0][at[0]]) return false;
  return p.odd.rank >= 0 && at[0] > static_cast<size_t>(p.odd.call);
}

}  // namespace purlin::test
