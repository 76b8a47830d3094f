// Where slots, words and counts lie, and how tags compare.
#pragma once
#include "../program.hpp"
#include "law.hpp"
#include "purlin/atom/cpu.hpp"

#include <algorithm>

namespace purlin::test {
namespace {

World empty_world(Random& random, const std::vector<std::unique_ptr<Built>>& none) {
  Setting s = draw_setting(random, static_cast<int>(random.between(2, 6)), {cpu::payload_bytes, cpu::line_bytes});
  s.limits.slots = static_cast<int>(random.between(1, 9));
  s.limits.slot_bytes *= random.chance(50) ? 4 : 1;
  return World(s, none);
}
bool no_two_things_share_a_byte() {
  for (Word seed = 0; seed < 300; ++seed) {
    Random random(seed);
    std::vector<std::unique_ptr<Built>> none;
    World world = empty_world(random, none);
    std::vector<Range> all;
    for (const auto& [range, name] : world.names()) all.push_back(range);
    std::sort(all.begin(), all.end(), [](Range a, Range b) { return a.lo < b.lo; });
    for (size_t k = 0; k + 1 < all.size(); ++k)
      if (all[k].hi > all[k + 1].lo) return false;
    if (all.back().hi > world.geometry().heap_at ||
        world.geometry().heap_at + world.geometry().heap_bytes > world.geometry().arena_bytes)
      return false;
  }
  return true;
}
// Slots and windows begin where a line begins, if they are whole lines long; words of different writers lie in different lines.
bool writers_do_not_share_lines() {
  for (Word seed = 0; seed < 300; ++seed) {
    Random random(seed);
    std::vector<std::unique_ptr<Built>> none;
    World world = empty_world(random, none);
    const Geometry& g = world.geometry();
    std::vector<std::pair<i64, int>> lines;  // line, writer
    int writer = 0;
    auto word = [&](const void* at) {
      lines.push_back({(static_cast<const char*>(at) - world.arena(0)) / line, writer});
    };
    Inbox in{g, world.arena(0)};
    word(in.poison());
    for (int p = 0; p < g.ranks - 1; ++p) {
      ++writer, word(in.post(p));
      for (int t = 0; t < g.teams; ++t) {
        for (int k = 0; k < packet_slots; ++k)
          if ((in.window(p, t, static_cast<Word>(k)) - world.arena(0)) % line) return false;
        if (g.slot_bytes % line == 0 && (in.slot(p, t, Use::gather, 1) - world.arena(0)) % line) return false;
        for (Use use : {Use::ring, Use::gather, Use::direct}) {
          ++writer;
          for (int s = 0; s < g.slots; ++s) word(in.ready(p, t, use, static_cast<Word>(s)));
        }
        ++writer, word(in.home(p, t));
        ++writer;
        for (int k = 0; k < max_grants; ++k) word(in.grants(p, t) + k);
        ++writer;
        for (int u = 0; u < uses; ++u) word(in.freed(p, t, static_cast<Use>(u)));
      }
    }
    std::sort(lines.begin(), lines.end());
    for (size_t k = 0; k + 1 < lines.size(); ++k)
      if (lines[k].first == lines[k + 1].first && lines[k].second != lines[k + 1].second) return false;
  }
  return true;
}
bool peers_see_each_other() {
  for (int ranks = 2; ranks <= max_ranks; ++ranks)
    for (int r = 0; r < ranks; ++r) {
      Call c{};
      c.rank = r;
      c.ranks = ranks;
      for (int p = 0; p < c.peers(); ++p) {
        Call other = c;
        other.rank = c.rank_of(p);
        if (other.rank == r || c.peer_of(other.rank) != p || other.peer_of(r) != c.as_seen_by(p)) return false;
      }
    }
  return true;
}
bool dividers_divide() {
  Random random(11);
  constexpr unsigned most = (1u << 31) - 1;
  for (int k = 0; k < 40000; ++k) {
    unsigned divisor = 1 + static_cast<unsigned>(random.next() >> 33) % (most >> random.below(31));
    unsigned n = static_cast<unsigned>(random.next() >> 33) & most;
    for (unsigned x : {n, n - n % divisor, most - most % divisor, most})
      if (Divider d = divider(divisor); d.divide(x) != x / divisor || (x > 0 && d.divide(x - 1) != (x - 1) / divisor))
        return false;
  }
  return true;
}
bool messages_go_round_the_slots() {
  for (int slots = 1; slots <= 9; ++slots) {
    Geometry g{};
    g.slots = slots;
    for (Word message : {Word{0}, Word{7}, Word{8}, (1ull << 40) - 1, 1ull << 40, (1ull << 40) + 5})
      if (static_cast<Word>(Inbox{g, nullptr}.slot_of(message)) != message % static_cast<Word>(slots)) return false;
  }
  return true;
}
bool tags_compare_under_wrap() {
  constexpr Word last = (1ull << 40) - 1;
  for (Word m : {Word{1}, Word{255}, last, last + 1, last + 7})
    for (unsigned signature : {0u, 1u, signature_mask}) {
      Word t = tag(m, signature);
      if (number_of(t) != (m & last) || signature_of(t) != signature ||
          number_of(t) == number_of(tag(m + 1, signature)))
        return false;
    }
  bool free_at_first = credit_for(1, 4) <= 1 && credit_for(1, 1) <= 1;
  return free_at_first && credit_for(9, 4) == 6 && credit_for(9, 1) == 9 && credit_for(3, 4) == 0 &&
         credit_for(4, 4) == 1;
}

void laws_of_addresses() {
  law("no two things share a byte", no_two_things_share_a_byte);
  law("writers do not share lines", writers_do_not_share_lines);
  law("peers see each other", peers_see_each_other);
  law("dividers divide", dividers_divide);
  law("messages go round the slots", messages_go_round_the_slots);
  law("tags compare under wrap", tags_compare_under_wrap);
}

}  // namespace
}  // namespace purlin::test
