// A soak of Endpoints: worlds of random size, each with a schedule of random agreeing calls, which its ranks make from threads of their own through Plan and
// Endpoint, as Python does. What comes out is compared with the reference to the byte, and canaries between all things with what they were.
// It stands on a Ground: memory and streams of the CPU (endpoint.cpp), or of a GPU (device.cu).
#pragma once
#include "trial.hpp"

#include <cstdio>
#include <map>
#include <stdexcept>
#include <thread>

namespace purlin::test {

// ---- a run ----------------------------------------------------------------------------------------------------------------------------------------------

class Run {
 public:
  Run(const Trial& trial, Ground& ground, double timeout_s) : t_(trial), ground_(ground), timeout_s_(timeout_s) {
    ranks_.resize(static_cast<size_t>(t_.limits.ranks));
  }
  ~Run() {
    ranks_.clear();
    ground_.give_back();
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Empty: right.
  std::string run() {
    arrange();
    for (int r = 0; r < count(); ++r) furnish(r);
    for (int r = 0; r < count(); ++r) employ(r);
    if (t_.mode == Mode::fused) {
      std::vector<Endpoint*> all;
      for (Rank& rank : ranks_) all.push_back(rank.end.get());
      fuse(all);
    }
    t_.mode == Mode::fused ? live_fused() : live_apart();
    return judge();
  }

 private:
  using Stream = Ground::Stream;

  struct Rank {
    char *arena, *own;     // what calls work on
    char *before, *after;  // what is in it before and after each plan's call: own memory, then heap
    Word* wrong;           // [schedule][own, heap]
    std::unique_ptr<Endpoint> end;
    std::vector<Plan> plans;
    Stream stream;
    int recording = -1;
    std::string broken;
  };
  struct Layout {               // of own memory, or of the heap
    std::vector<i64> call_at;   // by call of the schedule
    std::vector<i64> image_at;  // by plan, in `before` and `after`
    i64 bytes = 0;
  };

  int count() const { return t_.limits.ranks; }
  Rank& rank(int r) { return ranks_[static_cast<size_t>(r)]; }
  const Part& part(int plan, int r) const { return t_.plans[static_cast<size_t>(plan)]->part[static_cast<size_t>(r)]; }
  static i64 bytes_of(const Part& part, int area) { return area == 0 ? part.own_bytes : part.heap_bytes; }
  i64 longest(size_t plan, int area) const {
    i64 bytes = 0;
    for (const Part& p : t_.plans[plan]->part) bytes = larger(bytes, bytes_of(p, area));
    return round_up(bytes, apart);
  }

  // -- before the first call
  void arrange() {
    for (int area = 0; area < 2; ++area) {
      Layout& a = areas_[area];
      for (size_t plan = 0; plan < t_.plans.size(); ++plan) {
        a.image_at.push_back(image_bytes_);
        image_bytes_ += longest(plan, area);
      }
      for (int plan : t_.schedule) {
        i64 bytes = longest(static_cast<size_t>(plan), area);
        a.call_at.push_back(t_.pace == Pace::tight ? a.bytes : 0);
        a.bytes = t_.pace == Pace::tight ? a.bytes + bytes : larger(a.bytes, bytes);
      }
    }
    const Limits& l = t_.limits;
    geometry_ = geometry_of(l.ranks, l.teams, l.slots, l.slot_bytes, l.window_bytes, areas_[1].bytes);
  }
  void furnish(int r) {
    Rank& k = rank(r);
    k.arena = ground_.take(geometry_.arena_bytes);
    k.own = ground_.take(areas_[0].bytes);
    k.before = image(r, &Region::before);
    k.after = image(r, &Region::after);
    std::vector<Word> right(2 * t_.schedule.size(), all_right);
    i64 bytes = static_cast<i64>(right.size() * sizeof(Word));
    k.wrong = reinterpret_cast<Word*>(ground_.take(bytes));
    ground_.write(reinterpret_cast<char*>(k.wrong), right.data(), bytes);
    k.stream = ground_.stream(t_.mode == Mode::fused && t_.graphs ? 0 : r);
    Word none = 0;
    Inbox inbox{geometry_, k.arena};
    ground_.write(reinterpret_cast<char*>(inbox.poison()), &none, sizeof none);
  }
  char* image(int r, std::vector<char> Region::* bytes) {
    std::vector<char> all(static_cast<size_t>(larger<i64>(image_bytes_, 1)), canary);
    for (size_t plan = 0; plan < t_.plans.size(); ++plan)
      for (const Region& region : part(static_cast<int>(plan), r).regions) {
        i64 at = areas_[region.area == Area::heap].image_at[plan] + region.at;
        std::copy((region.*bytes).begin(), (region.*bytes).end(), all.begin() + at);
      }
    char* there = ground_.take(static_cast<i64>(all.size()));
    ground_.write(there, all.data(), static_cast<i64>(all.size()));
    return there;
  }
  void employ(int r) {
    Rank& k = rank(r);
    std::vector<std::uintptr_t> arenas;
    for (const Rank& other : ranks_) arenas.push_back(reinterpret_cast<std::uintptr_t>(other.arena));
    k.end = std::make_unique<Endpoint>(r, geometry_, arenas, timeout_s_, nullptr);
    k.end->begin_at(t_.start);
    for (const auto& built : t_.plans) k.plans.emplace_back(text_of(*built, r), geometry_);
  }

  // -- calls
  // Every rank in a thread of its own. What one of them throws ends the calls of all.
  template <class F>
  void each(F f) {
    std::vector<std::thread> threads;
    for (int r = 0; r < count(); ++r)
      threads.emplace_back([this, r, f] {
        try {
          f(r);
        } catch (const std::exception& error) {
          rank(r).broken = error.what();
          rank(r).end->abort(static_cast<int>(Fault::died), r);
        }
      });
    for (std::thread& t : threads) t.join();
  }
  void live_fused() {
    int recording = -1;
    if (t_.graphs) {
      ground_.begin_record(rank(0).stream);
      each([this](int r) { round(r); });
      recording = ground_.end_record(rank(0).stream);
    }
    for (int k = 0; k < t_.rounds; ++k) {
      if (recording >= 0 && (t_.seed >> k & 1)) {
        ground_.play(recording, rank(0).stream);
      } else {
        each([this](int r) { round(r); });
      }
      for (int r = 0; r < count(); ++r) ground_.finish(rank(r).stream);
    }
  }
  void live_apart() {
    if (t_.graphs)
      each([this](int r) {
        if (!(t_.seed >> r & 1)) return;
        ground_.begin_record(rank(r).stream);
        round(r);
        rank(r).recording = ground_.end_record(rank(r).stream);
      });
    each([this](int r) {
      for (int k = 0; k < t_.rounds; ++k) {
        if (rank(r).recording >= 0) {
          ground_.play(rank(r).recording, rank(r).stream);
        } else {
          round(r);
        }
        ground_.finish(rank(r).stream);
      }
    });
  }
  void round(int r) {
    Random random(t_.seed + static_cast<Word>(r));
    int calls = static_cast<int>(t_.schedule.size());
    if (t_.pace == Pace::tight)
      for (int e = 0; e < calls; ++e) restore(r, e);
    if (t_.ahead >= 0 && t_.ahead != r) ground_.dawdle(rank(r).stream, head_start_us);
    for (int e = 0; e < calls; ++e) {
      if (t_.pace == Pace::loose) restore(r, e);
      if (t_.skewed && random.chance(25)) ground_.dawdle(rank(r).stream, 1 << random.below(7));
      call(r, e);
      if (t_.pace == Pace::loose) compare(r, e);
    }
    if (t_.pace == Pace::tight)
      for (int e = 0; e < calls; ++e) compare(r, e);
  }
  void call(int r, int e) {
    Rank& k = rank(r);
    int plan = t_.schedule[static_cast<size_t>(e)];
    const Part& p = part(plan, r);
    auto addresses = [&](const std::vector<int>& regions) {
      std::vector<std::uintptr_t> all;
      for (int region : regions) {
        const Region& tensor = p.regions[static_cast<size_t>(region)];
        all.push_back(reinterpret_cast<std::uintptr_t>(live(r, tensor.area == Area::heap, e) + tensor.at));
      }
      return all;
    };
    Outcome how = k.end->run(k.plans[static_cast<size_t>(plan)], addresses(p.inputs), addresses(p.outputs), k.stream);
    if (how != Outcome::done && k.broken.empty())
      k.broken = "call " + std::to_string(e) + " ends with outcome " + std::to_string(static_cast<int>(how));
  }
  char* live(int r, int area, int e) {
    char* first = area == 0 ? rank(r).own : rank(r).arena + geometry_.heap_at;
    return first + areas_[area].call_at[static_cast<size_t>(e)];
  }
  template <class F>
  void each_area(int r, int e, F f) {
    size_t plan = static_cast<size_t>(t_.schedule[static_cast<size_t>(e)]);
    for (int area = 0; area < 2; ++area)
      if (i64 bytes = bytes_of(part(static_cast<int>(plan), r), area); bytes > 0)
        f(live(r, area, e), areas_[area].image_at[plan], bytes, rank(r).wrong + 2 * e + area);
  }
  void restore(int r, int e) {
    each_area(r, e, [&](char* at, i64 image, i64 bytes, Word*) {
      ground_.copy(rank(r).stream, at, rank(r).before + image, bytes);
    });
  }
  void compare(int r, int e) {
    each_area(r, e, [&](char* at, i64 image, i64 bytes, Word* wrong) {
      ground_.compare(rank(r).stream, at, rank(r).after + image, bytes, wrong);
    });
  }

  // -- after the last
  std::string judge() {
    for (int r = 0; r < count(); ++r)
      if (std::string fault = fault_of(r); !fault.empty()) return fault;
    for (int r = 0; r < count(); ++r)
      if (!rank(r).broken.empty()) return "rank " + std::to_string(r) + ": " + rank(r).broken;
    for (int r = 0; r < count(); ++r)
      if (std::string wrong = wrong_of(r); !wrong.empty()) return wrong;
    for (int r = 0; r < count(); ++r)
      if (std::string dead = canaries(r); !dead.empty()) return dead;
    return "";
  }
  std::string fault_of(int r) {
    Death d = rank(r).end->death();
    if (d.what == 0) return "";
    Stalled s = rank(d.by < count() ? d.by : r).end->stalled();
    char text[160];
    std::snprintf(
        text, sizeof text,
        "agreeing calls end in fault %d at rank %d, about rank %d (wait %d, use %d, step %d, team %d, peer %d)", d.what,
        d.by, d.about, s.what, s.use, s.step, s.team, s.peer);
    bool stalled = static_cast<Fault>(d.what) == Fault::stall;
    return std::string(text) + (stalled ? "; was the GPU, if it ran on one, this program's alone?" : "");
  }
  std::string wrong_of(int r) {
    std::vector<Word> wrong(2 * t_.schedule.size());
    ground_.read(wrong.data(), reinterpret_cast<char*>(rank(r).wrong), static_cast<i64>(wrong.size() * sizeof(Word)));
    for (size_t e = 0; e < t_.schedule.size(); ++e)
      for (int area = 0; area < 2; ++area)
        if (Word at = wrong[2 * e + static_cast<size_t>(area)]; at != all_right)
          return "wrong data at rank " + std::to_string(r) + ", call " + std::to_string(e) + ", byte " +
                 std::to_string(at) + (area ? " of the heap: " : " of its own: ") +
                 describe(t_.plans[static_cast<size_t>(t_.schedule[e])]->shape);
    return "";
  }
  std::string canaries(int r) {
    for (Range u : arena_of(geometry_).unused) {
      std::vector<char> found(static_cast<size_t>(u.hi - u.lo));
      ground_.read(found.data(), rank(r).arena + u.lo, u.hi - u.lo);
      for (size_t i = 0; i < found.size(); ++i)
        if (found[i] != canary)
          return "byte " + std::to_string(u.lo + static_cast<i64>(i)) + " of rank " + std::to_string(r) +
                 "'s arena, which belongs to nobody, is written";
    }
    return "";
  }

  static constexpr Word all_right = ~Word{0};
  static constexpr i64 apart = 256;

  const Trial& t_;
  Ground& ground_;
  const double timeout_s_;
  Geometry geometry_{};
  Layout areas_[2];
  i64 image_bytes_ = 0;
  std::vector<Rank> ranks_;
};

// ---- the program ----------------------------------------------------------------------------------------------------------------------------------------

struct Census {  // of what has been run
  std::map<std::string, long> of;
  void add(const Trial& t) {
    ++of[std::to_string(t.limits.ranks) + " ranks"];
    ++of[t.mode == Mode::fused ? "fused" : "streams"];
    ++of[t.pace == Pace::tight ? "tight" : "loose"];
    if (t.graphs) ++of["graphs"];
    if (t.ahead >= 0) ++of["one rank ahead"];
    for (int plan : t.schedule) {
      std::string what = describe(t.plans[static_cast<size_t>(plan)]->shape);
      of["calls " + what.substr(0, what.find(','))] += t.rounds;
    }
  }
};

inline int number_of(const char* const* names, int count, const std::string& name) {
  for (int k = 0; k < count; ++k)
    if (name == names[k]) return k;
  return -1;
}
// False: it is not an option, or has no such value.
inline bool take_option(Options& o, const std::string& option, const std::string& value) {
  static const char *const modes[] = {"fused", "streams"}, *const regimes[] = {"staged", "packet", "direct"},
                           *const kinds[] = {"copy", "reduce", "all-reduce"};
  if (option == "--mode") return (o.mode = number_of(modes, 2, value)) >= 0;
  if (option == "--regime") return (o.regime = number_of(regimes, 3, value)) >= 0;
  if (option == "--kind") return (o.kind = number_of(kinds, 3, value)) >= 0;
  char* end = nullptr;
  double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end || number < 0) return false;
  if (option == "--calls") o.calls = static_cast<long>(number);
  else if (option == "--bytes") o.bytes = static_cast<i64>(number);
  else if (option == "--seed") o.seed = static_cast<Word>(number);
  else if (option == "--failures") o.failures = static_cast<int>(number);
  else if (option == "--timeout") o.timeout_s = number;
  else if (option == "--ranks") return (o.ranks = static_cast<int>(number)) >= 2 && o.ranks <= most_ranks;
  else return false;
  return true;
}

constexpr const char* usage =
    "[--calls N] [--seed S] [--ranks 2..8] [--mode fused|streams] [--regime staged|packet|direct] [--kind "
    "copy|reduce|all-reduce] [--bytes N] [--timeout SECONDS] [--failures N]\n"
    "  --calls: at least; --seed: the first; --bytes: that all ranks together move in a call, at most; --timeout: of a "
    "wait, 10 unless named\n"
    "  On a GPU the kernels of all ranks wait for one another: no other process may use it meanwhile";

// Exit status: 0 when all was right. A passed call counts one, a failed schedule too.
inline int soak(int argc, char** argv, Ground& ground) {
  Options options;
  options.calls = ground.limits().calls;
  for (int i = 1; i < argc; i += 2)
    if (i + 1 == argc || !take_option(options, argv[i], argv[i + 1]))
      return std::printf("usage: %s %s\n", argv[0], usage), 2;
  Census census;
  long calls = 0, passed = 0;
  int failed = 0;
  bool hopeless = false;
  for (Word seed = options.seed; calls < options.calls && failed < options.failures && !hopeless; ++seed) {
    Trial trial = draw_trial(seed, options, ground.limits());
    long here = static_cast<long>(trial.schedule.size()) * trial.rounds;
    std::string wrong;
    try {
      wrong = Run(trial, ground, options.timeout_s).run();
    } catch (const std::exception& error) {
      wrong = error.what();
      hopeless = true;  // as a rule nothing works any more
    }
    calls += here;
    census.add(trial);
    if (wrong.empty()) {
      passed += here;
      continue;
    }
    ++failed;
    std::printf("seed %llu: %s\n", seed, wrong.c_str());
    std::fflush(stdout);
  }
  for (const auto& [what, n] : census.of) std::printf("  %8ld  %s\n", n, what.c_str());
  std::printf("%ld passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace purlin::test
