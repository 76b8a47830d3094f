// What a soak draws: a world, what its ranks do, and each plan as Python writes it.
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

constexpr int head_start_us = 2000;  // far more than it takes to launch and run as many packets as there are windows

struct Trial {  // a world and what its ranks do
  Limits limits{};
  Word start = 1;
  Mode mode = Mode::fused;
  Pace pace = Pace::loose;
  int rounds = 1;
  bool graphs = false, skewed = false;
  int ahead = -1;  // this rank only sends in the first calls, which the others begin `head_start_us` later; -1: none
  Word seed = 0;   // of delays, and of which ranks replay graphs
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
  auto arena = [&] {
    return i64{l.ranks - 1} * l.teams * (2 * l.slots * l.slot_bytes + 2 * packet_slots * l.window_bytes);
  };
  while (arena() > most.arena_bytes && l.slot_bytes > 64) l.slot_bytes = round_up(l.slot_bytes / 2, 16);
  return l;
}

inline Shape draw_call(Random& random, const Limits& limits, Regime regime, int kind, i64 most_bytes) {
  static const i64 sizes[] = {64, 400, 400, 4 << 10, 4 << 10, 32 << 10, 256 << 10, 2 << 20};
  i64 bytes = smaller(random.pick(sizes, 8), most_bytes);
  Shape s = draw_shape(random, limits, regime, bytes);
  while (kind >= 0 && s.kind != static_cast<Kind>(kind)) s = draw_shape(random, limits, regime, bytes);
  s.plain = random.chance(40);
  bool even = random.chance(50);  // GPUs carry these by bulk copies
  s.grain = even || random.chance(20) ? 16 : i64{1} << random.below(4);
  if (s.kind != Kind::copy) s.grain = larger(s.grain, s.unit);  // what is added lies at multiples of its size
  bool whole = even || random.chance(20), full = random.chance(40);
  for (auto& row : s.elements)
    for (i64& n : row) {
      if (full && n > 0) n = bytes / s.unit - random.below(larger<i64>(1, bytes / s.unit / 8));
      if (whole) n = n * s.unit / 16 * 16 / s.unit;
    }
  return s;
}

inline int enlist(Trial& t, const Shape& shape) {
  t.plans.push_back(Builder(shape, t.limits, Wires::planned).build());
  return static_cast<int>(t.plans.size()) - 1;
}

// Packets from one rank to all others, and none back: nothing but the credit keeps it from windows that nobody has read.
inline Shape draw_one_way(Random& random, const Limits& limits, int source, i64 most_bytes) {
  Shape s = draw_call(random, limits, Regime::packet, static_cast<int>(Kind::copy), most_bytes);
  for (int r = 0; r < limits.ranks; ++r)
    for (i64& n : s.elements[r]) n = r == source ? larger<i64>(1, n) : 0;
  return s;
}
// They come before all other calls: no reader has freed a window yet, so one credit too many is enough to write the first of them again.
inline void draw_head_start(Random& random, Trial& t, i64 most_bytes) {
  t.ahead = static_cast<int>(random.below(t.limits.ranks));
  std::vector<int> first;
  for (i64 calls = random.between(2 * packet_slots, 3 * packet_slots); calls > 0; --calls) {
    bool again = !first.empty() && random.chance(50);
    first.push_back(again ? first.back() : enlist(t, draw_one_way(random, t.limits, t.ahead, most_bytes)));
  }
  t.schedule.insert(t.schedule.begin(), first.begin(), first.end());
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
  constexpr int regimes = 3;
  int only = options.regime >= 0 ? options.regime : random.chance(50) ? static_cast<int>(random.below(regimes)) : -1;
  for (int k = 0; k < calls; ++k) {
    if (k > 0 && random.chance(50)) {
      t.schedule.push_back(random.pick(t.schedule));  // the same call once more
      continue;
    }
    Regime regime = static_cast<Regime>(only >= 0 ? only : random.below(regimes));
    Shape shape = draw_call(random, t.limits, regime, options.kind, message);
    t.schedule.push_back(enlist(t, shape));
  }
  bool packets = only < 0 || static_cast<Regime>(only) == Regime::packet;
  if (t.mode == Mode::streams && packets && options.kind <= 0 && random.chance(40)) draw_head_start(random, t, message);
  return t;
}

inline std::string describe(const Shape& s) {
  static const char *const kinds[] = {"copy", "reduce", "all-reduce"},
                           *const regimes[] = {"staged", "packet", "direct"},
                           *const ops[] = {"sum", "avg", "max", "min"};
  std::string text = std::string(regimes[static_cast<int>(s.regime)]) + " " + kinds[static_cast<int>(s.kind)];
  if (s.in_one_exchange()) text += " in one exchange";
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
// Half of the plans that leave room for it have a block for each role, where there are blocks. In copies through rings what stays at home may be a role, too,
// of all ranks or of half of them.
inline bool copies_apart(const Call& c) {
  bool all = (c.signature & 16) != 0, half = (c.signature & 32) != 0;
  return c.kind == Kind::copy && c.regime == Regime::staged && all && !(half && c.rank % 2 != 0);
}
inline int parts_of(const Call& c) {
  constexpr int room = 96;  // of what any GPU with bulk copies has
  if (c.kind != Kind::copy && c.regime == Regime::direct) return 1;
  int roles = c.kind == Kind::all_reduce || copies_apart(c) ? 3 : 2;
  return roles * c.teams * c.ranks <= room && (c.signature & 8) != 0 ? roles : 1;
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
  text.parts = parts_of(c);
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
  text.onto_sent = c.onto_sent;
  return text;
}

}  // namespace purlin::test
