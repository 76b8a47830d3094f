// The weakest machine the contract allows, for tests: fibres under a seeded scheduler that starves some of them, over the memory of views.hpp. What a role
// has started is performed as late as the seed wants.
#pragma once
#include "../moves.hpp"
#include "random.hpp"
#include "views.hpp"

#include <ucontext.h>
#include <cstdarg>
#include <functional>
#include <string>

namespace purlin::model {

// ---- roles: what is started and not yet performed -----------------------------------------------------------------------------------------------------

// Returns whether it is done; called again until it is.
using Act = std::function<bool()>;

struct Held {  // what a role has read ahead, in this step
  Place place{};
  Range range{};
  std::shared_ptr<std::string> bytes;

  bool is(const Place& from, Range wire) const {
    return bytes && place.items == from.items && place.first == from.first && place.tensors == from.tensors &&
           range.lo == wire.lo && range.hi == wire.hi;
  }
};

struct Role {
  enum class Phase { idle, open, steps, close };

  int actor = 0, rank = 0, team = 0;
  const char* name = "";
  Phase phase = Phase::idle;
  bool failed = false;  // a wait ended in anything but yes
  bool draining = false;
  Clock start, seen;  // at the call's entry, and now
  std::uint32_t tick = 0;
  std::vector<Held> held;
  std::deque<Act> queue;   // performed in order
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

  Machine(Memory& memory_, Stacks& stacks, Random random_, Temper temper_)
      : memory(memory_), random(random_), temper(temper_), stacks_(stacks) {}
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
    makecontext(&f.context, reinterpret_cast<void (*)()>(&Machine::enter), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
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
    if (!role.loose.empty() && (role.queue.empty() || random.chance(50)))
      return perform_from(role.loose, random.below(static_cast<i64>(role.loose.size())));
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
    for (const Fibre* f : live_)
      all += "  rank " + std::to_string(f->rank) + " " + (f->role ? f->role->name : "") + " waits for " +
             (f->ready ? f->waits_for() : "nothing") + "\n";
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
    std::snprintf(line, sizeof line, "%6ld  rank %d team %d %-7s %s", turn_, role ? role->rank : -1,
                  role ? role->team : -1, role ? role->name : "host", text);
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
    } catch (const Stopped&) {}
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
