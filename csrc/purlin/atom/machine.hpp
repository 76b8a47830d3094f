// The weakest machine the contract allows, for tests. Fibres run under a seeded scheduler that starves some of them; what a role has started is performed as
// late as the seed wants; and memory is judged by *happens-before*: each actor has a clock of what it has seen of every other, a release attaches the
// clock to the word, an acquire joins it. So a missing release or acquire is caught although the processor that runs the test would hide it:
//   - a word keeps all its versions, and a load may return any one at or after the reader's clock;
//   - two accesses to a byte, one of them a write, that no chain of releases and acquires orders are an error, whatever the values.
#pragma once
#include "../channel.hpp"
#include "random.hpp"

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <ucontext.h>
#include <vector>

namespace purlin::model {

using std::size_t;

struct Broken : std::runtime_error {  // a law of the machine does not hold
  using std::runtime_error::runtime_error;
};

// ---- who has seen what --------------------------------------------------------------------------------------------------------------------------------

constexpr int max_actors = 32;  // two roles of every team of every rank, and a host a rank

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

  static bool ordered(Stamp before, Stamp by, const Clock& seen) { return before.actor == by.actor || seen.knows(before); }
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
    std::snprintf(text, sizeof text, "race: actor %u %s (byte %ld; actor %u, tick %u)", unsigned{by.actor}, what, static_cast<long>(at - first_), unsigned{other.actor}, unsigned{other.tick});
    throw Broken(text);
  }

  char* first_;
  i64 bytes_;
  std::vector<Shadow> shadow_;
  std::vector<int> index_;
  std::deque<Location> locations_;
};

// ---- roles: what is started and not yet performed -----------------------------------------------------------------------------------------------------

// Returns whether it is done; called again until it is.
using Act = std::function<bool()>;

struct Role {
  enum class Phase { idle, open, steps, close };

  int actor = 0, rank = 0, team = 0;
  const char* name = "";
  Phase phase = Phase::idle;
  bool failed = false;    // a wait ended in anything but yes
  bool draining = false;
  Clock start, seen;      // at the call's entry, and now
  std::uint32_t tick = 0;
  std::deque<Act> queue;  // performed in order
  std::vector<Act> loose;  // performed in any order

  bool idle() const { return queue.empty() && loose.empty(); }
  Stamp now() { return {static_cast<std::uint8_t>(actor), ++tick & 0xffffffu}; }
};

// ---- fibres -------------------------------------------------------------------------------------------------------------------------------------------

class Stacks {  // given back and used again
 public:
  using Stack = std::unique_ptr<char[]>;
  static constexpr size_t bytes = 64 << 10;

  Stack take() {
    if (free_.empty()) return std::make_unique<char[]>(bytes);
    Stack s = std::move(free_.back());
    free_.pop_back();
    return s;
  }
  void give(Stack s) { free_.push_back(std::move(s)); }

 private:
  std::vector<Stack> free_;
};

struct Fibre {
  int rank = 0;
  Role* role = nullptr;  // as which it acts
  std::function<void()> body;
  std::function<bool()> ready;  // nothing: it can go on
  std::function<std::string()> waits_for;
  bool over = false;
  ucontext_t context{};
  Stacks::Stack stack;
};

// A machine with a flaw must be found out by the tests that pass on one without.
enum class Flaw { none, relaxed_notify, relaxed_wait, early_notify, unordered, no_push, deaf_meet };

struct Temper {  // how a seed wants the machine to behave, percent
  int eager;     // something that was started is performed although nobody needs it
  int stale;     // a load returns an old version
  int starve;    // in a turn: some fibre, or all of a rank, is starved for a while
  int yield;     // a fibre lets others run after an operation
  Flaw flaw;
};

class Machine {
 public:
  enum class Ending { done, dead, broken };

  Machine(Memory& memory_, Stacks& stacks, Random random_, Temper temper_) : memory(memory_), random(random_), temper(temper_), stacks_(stacks) {}
  Machine(const Machine&) = delete;
  ~Machine() { unwind(); }

  Memory& memory;
  Random random;
  const Temper temper;
  std::string broken;  // what law
  bool tracing = false;
  std::function<std::string(const void*)> name;  // of a word, for traces

  // -- of a fibre
  Fibre& spawn(int rank, std::function<void()> body) {
    Fibre& f = *fibres_.emplace_back(std::make_unique<Fibre>());
    f.rank = rank;
    f.body = std::move(body);
    f.stack = stacks_.take();
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = Stacks::bytes;
    f.context.uc_link = nullptr;
    auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&f.context, reinterpret_cast<void (*)()>(&Machine::enter), 2, static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
    live_.push_back(&f);
    return f;
  }
  Fibre& current() { return *current_; }
  void yield() {
    if (random.chance(temper.yield)) leave_to_scheduler();
  }
  void block(std::function<bool()> ready, std::function<std::string()> waits_for) {
    if (ready()) return yield();
    current_->ready = std::move(ready);
    current_->waits_for = std::move(waits_for);
    leave_to_scheduler();
  }
  void join(Fibre& other) {
    block([&other] { return other.over; }, [] { return std::string("another fibre"); });
  }

  // -- of roles
  void add(Role& role) { roles_.push_back(&role); }
  void perform(Role& role) {  // one thing that it started
    if (!role.loose.empty() && (role.queue.empty() || random.chance(50))) return perform_from(role.loose, random.below(static_cast<i64>(role.loose.size())));
    perform_from(role.queue, temper.flaw == Flaw::unordered ? random.below(static_cast<i64>(role.queue.size())) : 0);
  }
  void perform_queue(Role& role) {
    while (!role.queue.empty()) perform_from(role.queue, 0);
  }

  // A version that `good` accepts, or nullptr. Now and then an old one; when nothing else can happen, any that serves.
  template <class Good>
  const Version* load(Word* word, const Role& role, Good good) {
    Memory::Choice c = memory.choice(word, role.actor, role.seen);
    if (last_chance_) {
      for (const Version* v = c.newest; v >= c.oldest; --v)
        if (good(*v)) return v;
      return nullptr;
    }
    const Version* v = random.chance(temper.stale) ? c.oldest + random.below(c.newest - c.oldest + 1) : c.newest;
    return good(*v) ? v : nullptr;
  }
  bool last_chance() const { return last_chance_; }

  // -- of the test
  Ending run() {
    try {
      while (!live_.empty() && broken.empty()) {
        ++turn_;
        if (!turn()) return Ending::dead;
      }
    } catch (const Broken& e) {
      broken = e.what();
    }
    return broken.empty() ? Ending::done : Ending::broken;
  }
  long turns() const { return turn_; }
  std::string blocked() const {
    std::string all;
    for (const Fibre* f : live_) all += "  rank " + std::to_string(f->rank) + " " + (f->role ? f->role->name : "") + " waits for " + (f->ready ? f->waits_for() : "nothing") + "\n";
    return all;
  }
  [[gnu::format(printf, 3, 4)]] void note(const Role* role, const char* format, ...) {
    if (!tracing) return;
    char text[256];
    va_list list;
    va_start(list, format);
    std::vsnprintf(text, sizeof text, format, list);
    va_end(list);
    char line[320];
    std::snprintf(line, sizeof line, "%6ld  rank %d team %d %-7s %s", turn_, role ? role->rank : -1, role ? role->team : -1, role ? role->name : "host", text);
    trace_.push_back(line);
    if (trace_.size() > 200) trace_.pop_front();
  }
  const std::deque<std::string>& trace() const { return trace_; }

 private:
  struct Stopped {};

  static void enter(unsigned high, unsigned low) {
    auto* m = reinterpret_cast<Machine*>(static_cast<std::uintptr_t>(high) << 32 | low);
    Fibre& f = *m->current_;
    try {
      f.body();
    } catch (const Broken& e) {
      if (m->broken.empty()) m->broken = e.what();
    } catch (const Stopped&) {
    }
    f.over = true;
    swapcontext(&f.context, &m->scheduler_);
  }
  void leave_to_scheduler() {
    swapcontext(&current_->context, &scheduler_);
    if (stopping_) throw Stopped{};
  }
  void resume(Fibre& f) {
    f.ready = nullptr;
    current_ = &f;
    swapcontext(&scheduler_, &f.context);
    current_ = nullptr;
    if (!f.over) return;
    std::erase(live_, &f);
    f.body = nullptr;
    stacks_.give(std::move(f.stack));
  }
  void unwind() {
    stopping_ = true;
    while (!live_.empty()) resume(*live_.back());
  }

  bool turn() {
    last_chance_ = false;
    if (random.chance(temper.starve)) starve();
    if (random.chance(temper.eager) && perform_any()) return true;
    if (turn_ < starved_until_ && run_one([&](const Fibre& f) { return !starved(f); })) return true;
    if (turn_ >= starved_until_ && run_one([](const Fibre&) { return true; })) return true;
    if (perform_any()) return true;
    last_chance_ = true;
    return run_one([](const Fibre&) { return true; });
  }
  void starve() {
    const Fibre& victim = *random.pick(live_);
    starved_rank_ = random.chance(50) ? victim.rank : -1;
    starved_ = &victim;
    starved_until_ = turn_ + random.between(1, random.chance(20) ? 1000 : 60);
  }
  bool starved(const Fibre& f) const { return &f == starved_ || f.rank == starved_rank_; }
  template <class Allowed>
  bool run_one(Allowed allowed) {
    size_t n = live_.size(), first = static_cast<size_t>(random.below(static_cast<i64>(n)));
    for (size_t k = 0; k < n; ++k) {
      Fibre& f = *live_[(first + k) % n];
      if (!allowed(f) || (f.ready && !f.ready())) continue;
      resume(f);
      return true;
    }
    return false;
  }
  bool perform_any() {
    size_t n = roles_.size(), first = n ? static_cast<size_t>(random.below(static_cast<i64>(n))) : 0;
    for (size_t k = 0; k < n; ++k) {
      Role& r = *roles_[(first + k) % n];
      if (r.idle() || (temper.flaw == Flaw::no_push && !r.draining)) continue;
      perform(r);
      return true;
    }
    return false;
  }
  template <class Acts>
  void perform_from(Acts& acts, i64 k) {
    auto it = acts.begin() + k;
    Act act = std::move(*it);
    bool done = act();
    it = acts.begin() + k;
    if (done) acts.erase(it);
    else *it = std::move(act);
  }

  Stacks& stacks_;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  std::vector<Fibre*> live_;
  std::vector<Role*> roles_;
  Fibre* current_ = nullptr;
  ucontext_t scheduler_{};
  const Fibre* starved_ = nullptr;
  int starved_rank_ = -1;
  long turn_ = 0, starved_until_ = 0;
  bool last_chance_ = false, stopping_ = false;
  std::deque<std::string> trace_;
};

}  // namespace purlin::model
