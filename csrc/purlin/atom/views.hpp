// Memory judged by *happens-before*. Each actor has a clock of what it has seen of every other; a release attaches its clock to the word, an acquire joins
// it. So a missing release or acquire is caught although the processor that runs the test would hide it:
//   - a word keeps all its versions, and a load may return any one at or after the reader's clock;
//   - two accesses to a byte, one of them a write, that no chain of releases and acquires orders are an error, whatever the values.
#pragma once
#include "../portable.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <stdexcept>
#include <vector>

namespace purlin::model {

using std::size_t;

struct Broken : std::runtime_error {  // a law of the machine does not hold
  using std::runtime_error::runtime_error;
};

// ---- who has seen what --------------------------------------------------------------------------------------------------------------------------------

constexpr int max_actors = 48;  // three roles of every team of every rank, and a host a rank

struct Stamp {  // one thing that an actor did; tick 0: before all
  std::uint32_t actor : 8 = 0;
  std::uint32_t tick : 24 = 0;
};

struct Clock {  // of every actor, the last thing that is known to have been done
  std::array<std::uint32_t, max_actors> tick{};

  bool knows(Stamp s) const { return tick[s.actor] >= s.tick; }
  void learn(Stamp s) {
    std::uint32_t& mine = tick[s.actor];
    mine = std::max<std::uint32_t>(mine, s.tick);
  }
  void join(const Clock& other) {
    for (size_t a = 0; a < tick.size(); ++a) tick[a] = std::max(tick[a], other.tick[a]);
  }
};

// ---- memory -------------------------------------------------------------------------------------------------------------------------------------------

struct Version {  // of a word, or of a line {payload, tag}
  Word value, payload;
  Stamp by;
  std::shared_ptr<const Clock> released;  // nullptr: a relaxed store
};

// All bytes and words that ranks share or that calls touch lie in one block.
class Memory {
 public:
  Memory(char* first, i64 bytes) : first_(first), bytes_(bytes) {
    shadow_.resize(static_cast<size_t>(bytes));
    index_.assign(static_cast<size_t>(bytes / 8), -1);
  }

  void read(const char* at, i64 bytes, Stamp by, const Clock& seen) {
    for (i64 i = 0; i < bytes; ++i) {
      Shadow& s = shadow(at + i);
      if (!ordered(s.write, by, seen)) race("reads what has not been released to it", at + i, by, s.write);
      Stamp& mine = s.read[0].actor == by.actor || ordered(s.read[0], by, seen) ? s.read[0] : s.read[1];
      mine = by;
    }
  }
  void write(const char* at, i64 bytes, Stamp by, const Clock& seen) {
    for (i64 i = 0; i < bytes; ++i) {
      Shadow& s = shadow(at + i);
      for (Stamp before : {s.write, s.read[0], s.read[1]})
        if (!ordered(before, by, seen)) race("writes what another may still use", at + i, by, before);
      s = {by, {}};
    }
  }

  void store(Word* word, Word value, Stamp by, std::shared_ptr<const Clock> released) {
    at(word).versions.push_back({value, 0, by, std::move(released)});
    *word = value;
  }
  // A line {payload, tag}, in one store.
  void store_line(Word* tag, Word value, Word payload, Stamp by, std::shared_ptr<const Clock> released) {
    at(tag).versions.push_back({value, payload, by, std::move(released)});
    tag[-1] = payload;
    tag[0] = value;
  }
  // The versions of a word that an actor's load may return.
  struct Choice {
    const Version* oldest;
    const Version* newest;
  };
  Choice choice(Word* word, int actor, const Clock& seen) {
    Location& l = at(word);
    size_t oldest = l.versions.size() - 1;
    while (oldest > l.last[static_cast<size_t>(actor)] && !seen.knows(l.versions[oldest].by)) --oldest;
    return {&l.versions[oldest], &l.versions.back()};
  }
  void has_read(Word* word, const Version* version, Stamp by) {
    Location& l = at(word);
    l.last[by.actor] = static_cast<std::uint16_t>(version - l.versions.data());
    l.read = by;
  }
  // The newest version has been read, and `seen` knows it: the word may be overwritten.
  bool let_go(Word* word, const Clock& seen) {
    Location& l = at(word);
    size_t newest = l.versions.size() - 1;
    return newest == 0 || (l.last[l.read.actor] == newest && seen.knows(l.read));
  }
  bool holds(const char* at) const { return at >= first_ && at < first_ + bytes_; }

 private:
  struct Shadow {
    Stamp write, read[2];  // the last ones; of the readers, two that no chain orders
  };
  struct Location {
    std::vector<Version> versions;
    std::array<std::uint16_t, max_actors> last{};  // what each actor has read: coherence forbids older ones
    Stamp read;
  };

  static bool ordered(Stamp before, Stamp by, const Clock& seen) {
    return before.actor == by.actor || seen.knows(before);
  }
  Shadow& shadow(const char* at) {
    if (!holds(at)) throw Broken("an access outside all memory");
    return shadow_[static_cast<size_t>(at - first_)];
  }
  Location& at(Word* word) {
    int& k = index_[static_cast<size_t>(reinterpret_cast<char*>(word) - first_) / 8];
    if (k < 0) {
      k = static_cast<int>(locations_.size());
      locations_.emplace_back().versions.push_back({*word, word[-1], {}, nullptr});
    }
    return locations_[static_cast<size_t>(k)];
  }
  [[noreturn]] void race(const char* what, const char* at, Stamp by, Stamp other) const {
    char text[160];
    std::snprintf(text, sizeof text, "race: actor %u %s (byte %ld; actor %u, tick %u)", unsigned{by.actor}, what,
                  static_cast<long>(at - first_), unsigned{other.actor}, unsigned{other.tick});
    throw Broken(text);
  }

  char* first_;
  i64 bytes_;
  std::vector<Shadow> shadow_;
  std::vector<int> index_;
  std::deque<Location> locations_;
};

}  // namespace purlin::model
