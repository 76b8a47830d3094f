// A soak of Endpoints: worlds of random size, each with a schedule of random agreeing calls, which its ranks make from threads of their own through Plan and
// Endpoint, as Python does. What comes out is compared with the reference to the byte, and canaries between all things with what they were.
// It stands on a Ground: memory and streams of the CPU (endpoint.cpp), or of a GPU (device.cu).
#pragma once
#include "arena.hpp"
#include "plan.hpp"
#include "purlin/endpoint.hpp"
#include "purlin/fault.hpp"

#include <cstdio>
#include <map>
#include <stdexcept>
#include <thread>

namespace purlin::test {

class Ground {
 public:
  using Stream = std::uintptr_t;
  struct Limits {
    i64 arena_bytes, call_bytes;  // of a rank; that all ranks move
    int teams;                    // of a world
    bool records;                 // graphs
    long calls;                   // to be made when none are named
  };

  virtual ~Ground() = default;
  virtual Limits limits() const = 0;
  virtual char* take(i64 bytes) = 0;  // memory of the ranks, full of canaries
  virtual void give_back() = 0;       // all that was taken
  virtual void write(char* to, const void* from, i64 bytes) = 0;
  virtual void read(void* to, const char* from, i64 bytes) = 0;

  // In the order of a stream. compare: *first_wrong becomes the least offset at which the two differ, if that is less.
  virtual Stream stream(int k) = 0;
  virtual void copy(Stream stream, char* to, const char* from, i64 bytes) = 0;
  virtual void compare(Stream stream, const char* at, const char* expected, i64 bytes, Word* first_wrong) = 0;
  virtual void dawdle(Stream stream, int microseconds) = 0;
  virtual void finish(Stream stream) = 0;

  virtual void begin_record(Stream) {}
  virtual int end_record(Stream) { return -1; }  // the number of a recording, until give_back
  virtual void play(int /* recording */, Stream) {}
};

// ---- what is drawn --------------------------------------------------------------------------------------------------------------------------------------

enum class Mode { fused, streams };
enum class Pace {
  loose,  // all calls use the same memory; before each its inputs are written, after it its tensors are compared
  tight   // each has its own, and they follow one another without a pause
};

struct Options {
  long calls = 0;
  i64 bytes = i64{1} << 40;
  Word seed = 0;
  int ranks = 0, regime = -1, kind = -1, mode = -1, failures = 3;  // ranks 0, the others -1: any
  double timeout_s = 10;
};

struct Trial {  // a world and what its ranks do
  Limits limits{};
  Word start = 1;
  Mode mode = Mode::fused;
  Pace pace = Pace::loose;
  int rounds = 1;
  bool graphs = false, skewed = false;
  Word seed = 0;  // of delays, and of which ranks replay graphs
  std::vector<std::unique_ptr<Built>> plans;
  std::vector<int> schedule;
};

inline Limits draw_limits(Random& random, const Options& options, const Ground::Limits& most) {
  static const int all_ranks[] = {2, 2, 2, 3, 3, 4, 4, 5, 7, 8, 8};
  static const i64 slots_bytes[] = {0, 0, 1 << 10, 4 << 10, 16 << 10, 48 << 10, 128 << 10},
                   windows_bytes[] = {0, 0, 1 << 10, 4 << 10, 16 << 10};
  Limits l{};
  l.ranks = options.ranks > 0 ? options.ranks : random.pick(all_ranks, 11);
  l.teams = static_cast<int>(random.between(1, larger(1, smaller(8, most.teams / l.ranks))));
  l.slots = random.chance(80) ? static_cast<int>(random.between(1, 4)) : 8;
  l.slot_bytes = random.pick(slots_bytes, 7) + 16 * random.between(1, 4);
  l.window_bytes = random.pick(windows_bytes, 5) + 16 * random.between(1, 5);
  auto arena = [&] { return i64{l.ranks - 1} * l.teams * (2 * l.slots * l.slot_bytes + 6 * l.window_bytes); };
  while (arena() > most.arena_bytes && l.slot_bytes > 64) l.slot_bytes = round_up(l.slot_bytes / 2, 16);
  return l;
}

inline Shape draw_call(Random& random, const Limits& limits, Regime regime, int kind, i64 most_bytes) {
  static const i64 sizes[] = {64, 400, 400, 4 << 10, 4 << 10, 32 << 10, 256 << 10, 2 << 20};
  i64 bytes = smaller(random.pick(sizes, 8), most_bytes);
  Shape s = draw_shape(random, limits, regime, bytes);
  while (kind >= 0 && s.kind != static_cast<Kind>(kind)) s = draw_shape(random, limits, regime, bytes);
  s.plain = random.chance(40);
  s.grain = random.chance(60) ? 16 : i64{1} << random.below(4);
  bool whole = random.chance(50), full = random.chance(40);
  for (auto& row : s.elements)
    for (i64& n : row) {
      if (full && n > 0) n = bytes / s.unit - random.below(larger<i64>(1, bytes / s.unit / 8));
      if (whole) n = n * s.unit / 16 * 16 / s.unit;
    }
  return s;
}

inline Trial draw_trial(Word seed, const Options& options, const Ground::Limits& most) {
  Random random(seed * 2 + 1);
  static const Word starts[] = {1, (1ull << 32) - 3, (1ull << 40) - 3};
  Trial t;
  t.limits = draw_limits(random, options, most);
  t.start = starts[random.below(3)] + static_cast<Word>(random.below(3));
  t.mode = options.mode >= 0 ? static_cast<Mode>(options.mode) : static_cast<Mode>(random.below(2));
  t.pace = random.chance(50) ? Pace::tight : Pace::loose;
  t.rounds = static_cast<int>(random.between(1, 3));
  t.graphs = most.records && random.chance(40);
  t.skewed = random.chance(70);
  t.seed = random.next();
  i64 message = smaller(most.call_bytes, options.bytes) / (t.limits.ranks * t.limits.ranks);
  int calls = static_cast<int>(random.between(4, 24));
  int regimes = options.kind <= 0 ? 3 : 2;  // a direct call only copies
  int only = options.regime >= 0 ? options.regime : random.chance(50) ? static_cast<int>(random.below(regimes)) : -1;
  for (int k = 0; k < calls; ++k) {
    if (k > 0 && random.chance(50)) {
      t.schedule.push_back(random.pick(t.schedule));  // the same call once more
      continue;
    }
    Regime regime = static_cast<Regime>(only >= 0 ? only : random.below(regimes));
    Shape shape = draw_call(random, t.limits, regime, options.kind, message);
    t.schedule.push_back(static_cast<int>(t.plans.size()));
    t.plans.push_back(Builder(shape, t.limits, Wires::planned).build());
  }
  return t;
}

inline std::string describe(const Shape& s) {
  static const char *const kinds[] = {"copy", "reduce", "all-reduce"},
                           *const regimes[] = {"staged", "packet", "direct"},
                           *const ops[] = {"sum", "avg", "max", "min"};
  std::string text = std::string(regimes[static_cast<int>(s.regime)]) + " " + kinds[static_cast<int>(s.kind)];
  if (s.kind != Kind::copy)
    text += std::string(", ") + ops[static_cast<int>(s.sum.op)] + " of dtype " +
            std::to_string(static_cast<int>(s.sum.dtype));
  if (s.form == Form::in_place) text += ", in place";
  return text + ", " + std::to_string(s.teams) + " teams, lag " + std::to_string(s.lag) + ", elements of " +
         std::to_string(s.unit) + " bytes at multiples of " + std::to_string(s.grain) + (s.plain ? ", plain" : "");
}

// ---- a plan as Python writes it -------------------------------------------------------------------------------------------------------------------------

inline RouteText text_of(const Route& route) {
  RouteText text{{route.lo, route.bytes}};
  for (int k = 0; k < route.count; ++k) {
    const Item& item = route.items[k];
    for (i64 n : {i64{item.box.tensor}, item.at, item.box.offset, item.box.run, i64{item.box.dims}})
      text.numbers.push_back(n);
    text.numbers.insert(text.numbers.end(), item.box.extent, item.box.extent + item.box.dims);
    text.numbers.insert(text.numbers.end(), item.box.stride, item.box.stride + item.box.dims);
  }
  return text;
}
inline PlanText text_of(const Built& built, int rank) {
  const Part& part = built.part[static_cast<size_t>(rank)];
  const Call& c = part.call;
  PlanText text{};
  text.kind = static_cast<int>(c.kind);
  text.regime = static_cast<int>(c.regime);
  text.op = static_cast<int>(c.sum.op);
  text.dtype = static_cast<int>(c.sum.dtype);
  text.rank = rank;
  text.ranks = c.ranks;
  text.teams = c.teams;
  text.lag = c.lag;
  text.grants = c.grants;
  text.signature = c.signature;
  text.own_from = text_of(c.own_from);
  text.own_to = text_of(c.own_to);
  for (int p = 0; p < c.peers(); ++p) {
    const Pair& pair = c.pair[p];
    text.send.push_back(text_of(pair.send));
    text.remote.push_back(c.regime == Regime::direct ? text_of(pair.remote) : RouteText{{0, 0}});
    text.receive.push_back(c.kind == Kind::reduce ? RouteText{{0, pair.receive.bytes}} : text_of(pair.receive));
    text.reach.push_back(pair.reach);
    text.send_signatures.push_back(pair.send_signature);
    text.receive_signatures.push_back(pair.receive_signature);
  }
  auto spans = [&](const std::vector<int>& regions) {
    std::vector<i64> bytes;
    for (int k : regions) bytes.push_back(static_cast<i64>(part.regions[static_cast<size_t>(k)].before.size()));
    return bytes;
  };
  text.input_spans = spans(part.inputs);
  text.output_spans = spans(part.outputs);
  text.overlap_allowed = built.shape.form == Form::in_place;
  return text;
}

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
    return text;
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
    "  --calls: at least; --seed: the first; --bytes: that all ranks together move in a call, at most";

// Exit status: 0 when all was right. A passed call counts one, a failed schedule too.
inline int soak(int argc, char** argv, Ground& ground) {
  Options options;
  options.calls = ground.limits().calls;
  for (int i = 1; i < argc; i += 2)
    if (i + 1 == argc || !take_option(options, argv[i], argv[i + 1]) || (options.regime == 2 && options.kind > 0))
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
