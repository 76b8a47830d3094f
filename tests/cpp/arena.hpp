// Every word, slot and window of an arena that the protocol may touch, by name, and the bytes between them, which belong to nobody.
#pragma once
#include "purlin/channel.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace purlin::test {

constexpr char canary = 0x5c;

struct Arena {
  std::vector<std::pair<Range, std::string>> used;  // offsets
  std::vector<Range> unused;                        // in order; all but the heap
};

class ArenaMap {
 public:
  explicit ArenaMap(const Geometry& g) : g_(g) {
    use(in_.poison(), 8, "poison");
    for (int p = 0; p < g.ranks - 1; ++p) {
      use(in_.post(p), 8, "post of peer " + std::to_string(p));
      for (int t = 0; t < g.teams; ++t) channel(p, t);
    }
    find_unused();
  }
  const Arena& arena() const { return arena_; }

 private:
  static constexpr const char* use_names[] = {"ring", "gather", "packet", "direct", "home"};

  void channel(int p, int t) {
    std::string of = " of peer " + std::to_string(p) + ", team " + std::to_string(t);
    for (Use u : {Use::ring, Use::gather})
      for (int s = 0; s < g_.slots; ++s) {
        std::string which = std::string(use_names[static_cast<int>(u)]) + " " + std::to_string(s) + of;
        use(in_.ready(p, t, u, static_cast<Word>(s)), 8, "ready " + which);
        use(in_.slot(p, t, u, static_cast<Word>(s)), g_.slot_bytes, "slot " + which);
      }
    use(in_.ready(p, t, Use::direct, 0), 8, "ready direct" + of);
    use(in_.home(p, t), 8, "home" + of);
    use(in_.grants(p, t), static_cast<i64>(max_grants * sizeof(Grant)), "grants" + of);
    for (int u = 0; u < uses; ++u)
      use(in_.freed(p, t, static_cast<Use>(u)), 8, "freed " + std::string(use_names[u]) + of);
    for (int s = 0; s < packet_slots; ++s)
      use(in_.window(p, t, static_cast<Word>(s)), g_.window_stored, "window " + std::to_string(s) + of);
  }
  void use(const void* where, i64 size, std::string name) {
    i64 at = static_cast<const char*>(where) - in_.arena;
    arena_.used.push_back({{at, at + size}, std::move(name)});
  }
  void find_unused() {
    std::vector<Range> all{{g_.heap_at, g_.heap_at + g_.heap_bytes}};
    for (const auto& [range, name] : arena_.used) all.push_back(range);
    std::sort(all.begin(), all.end(), [](Range a, Range b) { return a.lo < b.lo; });
    i64 end = 0;
    for (Range r : all) {
      if (end < r.lo) arena_.unused.push_back({end, r.lo});
      end = larger(end, r.hi);
    }
    arena_.unused.push_back({end, g_.arena_bytes});
  }

  const Geometry& g_;
  alignas(line) char origin_[line];  // addresses are only computed
  Inbox in_{g_, origin_};
  Arena arena_;
};
inline Arena arena_of(const Geometry& geometry) { return ArenaMap(geometry).arena(); }

}  // namespace purlin::test
