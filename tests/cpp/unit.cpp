// Laws of the parts below the protocol: wires and cursors, 16-bit floats, addresses, tags, and the waits of the CPU Atom one by one.
#include "program.hpp"
#include "purlin/atom/cpu.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

namespace purlin::test {
namespace {

int passed = 0, failed = 0;

template <class F>
void law(const std::string& name, F holds) {
  bool ok = holds();
  ++(ok ? passed : failed);
  if (!ok) std::printf("FAILED: %s\n", name.c_str());
}

// ---- wires ----------------------------------------------------------------------------------------------------------------------------------------------

struct Strung {  // boxes on a wire, and the bytes they lie in
  Wire wire;
  std::vector<Item> from, to;
  std::vector<std::vector<char>> source, target;
};

std::vector<Item> lay(Shelf& shelf, const Wire& w, i64 unit) {
  std::vector<Item> items;
  for (Range s : w.spans) items.push_back({s.lo, s.hi - s.lo, shelf.lay(s.hi - s.lo, unit)});
  return items;
}
std::vector<std::vector<char>> memory(Random& random, const Shelf& shelf) {
  std::vector<std::vector<char>> all;
  for (int k = 0; k < shelf.tensors(); ++k) {
    std::vector<char>& bytes = all.emplace_back(static_cast<size_t>(shelf.bytes(k) + 8));
    for (char& c : bytes) c = static_cast<char>(random.next());
  }
  return all;
}
std::vector<char*> bases(std::vector<std::vector<char>>& all) {
  std::vector<char*> at;
  for (auto& bytes : all) at.push_back(bytes.data());
  return at;
}
Strung string_up(Random& random) {
  Shape shape{};
  shape.regime = Regime::staged;
  shape.unit = i64{1} << random.below(4);
  Limits limits{2, 3, 2, 16 * random.between(1, 4), 16};
  Strung s;
  s.wire = wire(random, shape, limits, random.below(10) ? random.between(1, 300) : 0, Wires::loose);
  Shelf from(random, 2, shape), to(random, 3, shape);
  s.from = lay(from, s.wire, shape.unit);
  s.to = lay(to, s.wire, shape.unit);
  s.source = memory(random, from);
  s.target = memory(random, to);
  return s;
}
Route route(const std::vector<Item>& items, const Wire& w) {
  return {items.data(), static_cast<int>(items.size()), w.lo, w.bytes, w.chunk};
}

void move_bytes(const Strung& s, Range range, std::vector<std::vector<char>>& target) {
  for (size_t k = 0; k < s.from.size(); ++k)
    for (i64 i = 0; i < s.from[k].bytes; ++i)
      if (i64 at = s.from[k].at + i; at >= range.lo && at < range.hi)
        target[static_cast<size_t>(s.to[k].box.tensor)][static_cast<size_t>(place_of(s.to[k].box, i))] =
            s.source[static_cast<size_t>(s.from[k].box.tensor)][static_cast<size_t>(place_of(s.from[k].box, i))];
}
void copy(const Place& to, const Place& from, Range range) {
  for_each_piece(to, from, range, [](char* write, const char* read, i64 bytes) {
    std::memcpy(write, read, static_cast<size_t>(bytes));
  });
}

bool pieces_are_the_bytes_of_the_wire() {
  for (Word seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    Strung s = string_up(random);
    Route from = route(s.from, s.wire), to = route(s.to, s.wire);
    std::vector<char*> source = bases(s.source), target = bases(s.target);
    auto expected = s.target;
    for (int turn = 0; turn < 4 && s.wire.bytes > 0; ++turn) {
      i64 lo = s.wire.lo + 16 * random.below(ceil_div(s.wire.bytes, 16));
      Range range{lo, smaller(lo + random.between(1, 120), s.wire.lo + s.wire.bytes)};
      move_bytes(s, range, expected);
      if (random.chance(50)) {
        copy(in_tensors(to, target.data()), in_tensors(from, source.data()), range);
      } else {  // by way of a slot, and granted outputs
        std::vector<char> slot(128);
        std::vector<Grant> grants;
        for (char* base : target) grants.push_back({static_cast<Word>(base - target[0]), 0});
        copy(in_slot(slot.data(), range.lo), in_tensors(from, source.data()), range);
        copy(in_granted(to, target[0], grants.data()), in_slot(slot.data(), range.lo), range);
      }
    }
    if (s.target != expected) return false;
  }
  return true;
}

bool chunks_cover_a_route_once() {
  for (Word seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    Route r{nullptr, 0, 16 * random.below(4), random.below(400), 16 * random.between(1, 4)};
    int teams = static_cast<int>(random.between(1, 5));
    std::vector<int> covered(static_cast<size_t>(r.bytes));
    for (int team = 0; team < teams; ++team) {
      int n = r.messages(team, teams);
      for (int step = 0; step < n; ++step) {
        Range c = r.range(step, team, teams);
        if (c.empty() || c.lo % 16 || c.hi - c.lo > r.chunk) return false;
        for (i64 i = c.lo; i < c.hi; ++i) ++covered[static_cast<size_t>(i - r.lo)];
      }
      if (!r.range(n, team, teams).empty() || !r.range(n + 7, team, teams).empty()) return false;
    }
    if (std::count(covered.begin(), covered.end(), 1) != r.bytes) return false;
  }
  return true;
}

std::vector<const char*> addresses(const Place& place, Range range) {  // of wire bytes
  std::vector<const char*> all;
  Cursor cursor(place, range.lo);
  for (i64 wire = range.lo; wire < range.hi; ++wire, cursor.advance(1)) all.push_back(cursor.at());
  return all;
}
// Whether the compiler knows that it is flat or not, in a rank's own tensors and in granted ones.
bool a_flat_route_names_the_bytes_of_its_item() {
  std::vector<char> memory(4096);
  std::vector<char*> tensors;
  std::vector<Grant> grants;
  for (i64 place : {96, 1024, 2048}) {
    tensors.push_back(memory.data() + place);
    grants.push_back({static_cast<Word>(place), 0});
  }
  for (Word seed = 0; seed < 500; ++seed) {
    Random random(seed);
    Item item{16 * random.below(4), random.between(1, 300), {}};
    item.box.run = item.bytes;
    item.box.offset = random.below(40);
    item.box.tensor = static_cast<int>(random.below(3));
    i64 skipped = smaller(16 * random.below(3), (item.bytes - 1) / 16 * 16), lo = item.at + skipped;
    Route boxes{&item, 1, lo, random.between(1, item.bytes - skipped), 16};
    Route flat{nullptr, 0, lo, boxes.bytes, 16, item.box.offset - item.at, item.box.tensor};
    Range range{lo, lo + boxes.bytes};
    auto own = addresses(in_tensors(boxes, tensors.data()), range);
    if (own.front() != tensors[static_cast<size_t>(item.box.tensor)] + item.box.offset + skipped) return false;
    for (const Place& place :
         {in_tensors(flat, tensors.data()), in_tensors<true>(flat, tensors.data()),
          in_granted(boxes, memory.data(), grants.data()), in_granted(flat, memory.data(), grants.data()),
          in_granted<true>(flat, memory.data(), grants.data())})
      if (addresses(place, range) != own) return false;
  }
  return true;
}

// ---- 16-bit floats --------------------------------------------------------------------------------------------------------------------------------------

struct Format {  // of a 16-bit float, by its definition
  std::string name;
  int exponent_bits, fraction_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint16_t infinity() const { return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << fraction_bits); }
  bool nan(unsigned bits) const { return (bits & 0x7fff) > infinity(); }
  double value(unsigned bits) const {  // of what is not NaN
    int exponent = static_cast<int>((bits & 0x7fff) >> fraction_bits),
        fraction = static_cast<int>(bits & ((1u << fraction_bits) - 1));
    double size = (bits & 0x7fff) == infinity() ? std::numeric_limits<double>::infinity()
                  : exponent == 0 ? std::ldexp(fraction, 1 - bias() - fraction_bits)
                                  : std::ldexp((1 << fraction_bits) + fraction, exponent - bias() - fraction_bits);
    return bits & 0x8000 ? -size : size;
  }
};
const Format formats[] = {{"half", 5, 10, numeric::half_to_float, numeric::float_to_half},
                          {"bfloat16", 8, 7, numeric::bfloat_to_float, numeric::float_to_bfloat}};

bool widening_keeps_the_value(const Format& f) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    float wide = f.widen(static_cast<std::uint16_t>(bits));
    if (f.nan(bits) ? !std::isnan(wide)
                    : (static_cast<double>(wide) != f.value(bits) || std::signbit(wide) != (bits >= 0x8000)))
      return false;
  }
  return true;
}
bool narrowing_undoes_widening(const Format& f) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    std::uint16_t back = f.narrow(f.widen(static_cast<std::uint16_t>(bits)));
    if (f.nan(bits) ? !f.nan(back) : back != bits) return false;
  }
  return true;
}
// Between each two neighbours: what is nearer is taken, and in the middle the even one.
bool narrowing_rounds_to_nearest_even(const Format& f) {
  for (unsigned bits = 0; bits < f.infinity(); ++bits)
    for (unsigned sign : {0u, 0x8000u}) {
      double here = f.value(bits), next = bits + 1 == f.infinity() ? 2 * here - f.value(bits - 1) : f.value(bits + 1);
      float middle = static_cast<float>((here + next) / 2);  // exact: one more bit
      float below = std::nextafter(middle, 0.0f),
            above = std::nextafter(middle, std::numeric_limits<float>::infinity());
      auto narrow = [&](float x) { return f.narrow(sign ? -x : x); };
      unsigned even = (bits & 1) ? bits + 1 : bits;
      if (narrow(middle) != (even | sign) || narrow(below) != (bits | sign) || narrow(above) != ((bits + 1) | sign))
        return false;
    }
  return true;
}

bool sums_are_rounded_once(const Format& f) {
  Random random(5);
  for (int k = 0; k < 20000; ++k) {
    double exact = 0;
    float wide = 0;
    for (int n = 0; n < 3; ++n) {  // few bits apart, so that the wide sum is exact
      std::uint16_t one = f.narrow(static_cast<float>(random.unit() * 8 - 4));
      wide = n == 0 ? f.widen(one) : numeric::join<Op::sum>(wide, f.widen(one));
      exact += f.value(one);
    }
    if (exact != static_cast<double>(wide)) continue;
    double got = f.value(f.narrow(wide)), step = std::ldexp(std::fabs(exact), -f.fraction_bits - 1);
    if (std::fabs(got - exact) > step && std::fabs(exact) > 1e-3) return false;
  }
  return true;
}

bool a_dtype_is_found_as_a_constant() {
  for (int k = 0; k < 9; ++k) {
    Dtype dtype = static_cast<Dtype>(k);
    if (numeric::with_constant(dtype, [](auto constant) { return constant.value; }) != dtype) return false;
  }
  return true;
}
bool sums_wrap_and_extremes_carry_nan() {
  float nan = std::numeric_limits<float>::quiet_NaN();
  bool carries = true;
  for (float x : {1.0f, -1.0f, 0.0f, std::numeric_limits<float>::infinity()})
    carries = carries && std::isnan(numeric::join<Op::max>(nan, x)) && std::isnan(numeric::join<Op::max>(x, nan)) &&
              std::isnan(numeric::join<Op::min>(nan, x)) && std::isnan(numeric::join<Op::min>(x, nan));
  i64 most = std::numeric_limits<i64>::max();
  return carries && numeric::join<Op::sum>(most, i64{1}) == std::numeric_limits<i64>::min() &&
         numeric::join<Op::max>(i64{-2}, i64{1}) == 1 && numeric::join<Op::min>(i64{-2}, i64{1}) == -2 &&
         numeric::join<Op::max>(2.0, 1.0) == 2.0 && numeric::join<Op::min>(2.0, 1.0) == 1.0;
}

// The CPU Atom's sums, of any length, at any alignment, for every type: those of the reference, bit for bit.
bool sums_are_those_of_the_reference() {
  for (Word seed = 0; seed < 600; ++seed) {
    Random random(seed);
    Sum sum{static_cast<Op>(random.below(4)), static_cast<Dtype>(random.below(9))};
    if (sum.dtype >= Dtype::int8 && sum.op == Op::avg) sum.op = Op::sum;
    i64 unit = bytes_of(sum.dtype), count = random.chance(10) ? random.between(500, 1100) : random.between(1, 40),
        shift = random.below(16);
    int n = static_cast<int>(random.between(1, 5)), self = static_cast<int>(random.below(n));
    std::vector<std::vector<char>> in(static_cast<size_t>(n),
                                      std::vector<char>(static_cast<size_t>(count * unit + 16)));
    for (auto& bytes : in)
      for (i64 i = 0; i < count; ++i) draw(random, sum, bytes.data() + shift + i * unit);
    std::vector<char> got(in[0].size(), 7), expected = got;
    for (i64 i = 0; i < count; ++i) {
      std::vector<const char*> all;
      for (auto& bytes : in) all.push_back(bytes.data() + shift + i * unit);
      fold(sum, all, expected.data() + shift + i * unit);
    }
    Item item{0, count * unit, {}};
    item.box.run = count * unit;
    item.box.offset = shift;
    char *to[] = {got.data()}, *mine[] = {in[static_cast<size_t>(self)].data()};
    Route r{&item, 1, 0, count * unit, 16};
    Call call{};
    cpu::Host host;
    cpu::Cpu<> atom(call, 0, host);
    atom.reduce(
        1, [&](int) { return in_tensors(r, to); }, in_tensors(r, mine), n,
        [&](int k) -> const char* { return in[static_cast<size_t>(k)].data() + shift; }, self, {0, count * unit}, sum);
    if (got != expected) return false;
  }
  return true;
}

// ---- addresses --------------------------------------------------------------------------------------------------------------------------------------------

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

// ---- the waits of the CPU Atom ----------------------------------------------------------------------------------------------------------------------------

// Rank 0 of two ranks, in a call that rank 1 never makes.
struct Alone {
  std::vector<std::unique_ptr<Built>> plans;
  World world;
  Call call;
  cpu::Host host;

  static std::vector<std::unique_ptr<Built>> one_plan(Limits limits) {
    Random random(1);
    Shape shape = draw_shape(random, limits, Regime::direct, 400);
    shape.elements[1][0] = shape.elements[0][1] = 8;
    std::vector<std::unique_ptr<Built>> plans;
    plans.push_back(Builder(shape, limits, Wires::planned).build());
    return plans;
  }
  explicit Alone(std::chrono::milliseconds timeout = std::chrono::milliseconds(20))
      : plans(one_plan({2, 1, 2, 32, 64})),
        world({{2, 1, 2, 32, 64}, 5, {cpu::payload_bytes, cpu::line_bytes}}, plans),
        call(world.call(0, 0)) {
    host.timeout = timeout;
  }
  Inbox inbox() const { return {call.geometry, call.own_arena()}; }
  Word* word() const { return inbox().ready(0, 0, Use::ring, 5); }
  Arrival expect(Word tag) {
    cpu::Cpu<> atom(call, 0, host);
    return atom.expect(1, [&](int) { return Mark{word(), tag}; }, {Where::What::message, Use::ring, 0});
  }
  Arrival wait(Word count) {
    cpu::Cpu<> atom(call, 0, host);
    return atom.wait(1, [&](int) { return Mark{inbox().freed(0, 0, Use::ring), count}; },
                     {Where::What::credit, Use::ring, 0});
  }
  Arrival granted(i64 place) {
    Grant* grant = inbox().grants(0, 0);
    *grant = {static_cast<Word>(place), tag(5, 1)};
    cpu::Cpu<> atom(call, 0, host);
    return atom.expect(1, [&](int) { return Mark{&grant->tag, tag(5, 1)}; }, {Where::What::grant, Use::direct, 0});
  }
  Fault fault(int rank) {
    Word w = cpu::shared(Inbox{call.geometry, call.arena[rank]}.poison()).load();
    return w ? decode(w).fault : Fault::none;
  }
  bool all_have(Fault f) { return fault(0) == f && fault(1) == f; }

  std::jthread rescue{[this](std::stop_token stop) {  // from a wait that does not end
    for (int k = 0; k < 300 && !stop.stop_requested(); ++k) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!stop.stop_requested()) cpu::poison(call.geometry, call.own_arena(), {Fault::died, 0, 0});
  }};
};

bool what_has_come_is_taken_at_once() {
  Alone a;
  *a.word() = tag(5, 3);
  return a.expect(tag(5, 3)) == Arrival::yes && a.wait(5) == Arrival::yes && a.wait(4) == Arrival::yes &&
         a.all_have(Fault::none);
}
bool a_wait_ends_at_its_deadline() {
  Alone a, b;
  bool ends = a.expect(tag(5, 3)) == Arrival::never && b.wait(6) == Arrival::never;
  return ends && a.all_have(Fault::stall) && b.all_have(Fault::stall) && a.host.record.peer == 1;
}
bool another_signature_is_another_call() {
  Alone a;
  *a.word() = tag(5, 4);
  return a.expect(tag(5, 3)) == Arrival::other && a.all_have(Fault::mismatch);
}
bool another_number_is_not_this_message() {
  Alone a;
  *a.word() = tag(6, 3);
  return a.expect(tag(5, 3)) == Arrival::never;
}
bool poison_ends_waits_and_calls() {
  Alone a(std::chrono::seconds(2)), b(std::chrono::seconds(2));
  cpu::poison(a.call.geometry, a.call.own_arena(), {Fault::died, 1, 1});
  cpu::poison(a.call.geometry, a.call.own_arena(), {Fault::stall, 0, 1});  // the first one stays
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    cpu::poison(b.call.geometry, b.call.own_arena(), {Fault::left, 1, 1});
  });
  bool ends =
      b.expect(tag(5, 3)) == Arrival::never && b.fault(1) == Fault::none;  // at its deadline it would tell the others
  later.join();
  return ends && a.expect(tag(5, 3)) == Arrival::never && a.fault(0) == Fault::died &&
         !cpu::Cpu<>(a.call, 0, a.host).enter();
}
bool a_post_of_another_call_ends_waits() {
  bool all = true;
  for (Word calls : {Word{5}, Word{6}, Word{9}}) {
    Alone a(std::chrono::seconds(2));
    *a.inbox().post(0) = tag(calls, a.call.signature + (calls == 5));
    all = all && a.expect(tag(5, 3)) == Arrival::other && a.all_have(Fault::mismatch);
  }
  return all;
}
bool a_farewell_ends_waits() {
  Alone a(std::chrono::seconds(2));
  *a.inbox().post(0) = farewell;
  return a.expect(tag(5, 3)) == Arrival::never && a.all_have(Fault::left);
}
bool a_post_of_this_call_or_an_earlier_one_does_not() {
  bool all = true;
  for (Word calls : {Word{5}, Word{4}, Word{0} - 3}) {
    Alone a;
    *a.inbox().post(0) = tag(calls, a.call.signature + (calls != 5));
    all = all && a.expect(tag(5, 3)) == Arrival::never && a.fault(0) == Fault::stall;
  }
  return all;
}
bool after_a_post_the_message_is_looked_at_once_more() {
  static Alone* late;  // its message comes, and then its peer is past the call, just before the wait looks at the post
  Alone a(std::chrono::seconds(2));
  late = &a;
  a.host.interrupted = [] {
    *late->word() = tag(5, 3);
    *late->inbox().post(0) = tag(6, 1);
    return false;
  };
  return a.expect(tag(5, 3)) == Arrival::yes && a.all_have(Fault::none);
}
bool a_grant_outside_the_heap_is_refused() {
  Alone inside;
  const Geometry& g = inside.call.geometry;
  i64 last = g.arena_bytes - inside.call.pair[0].reach;
  bool all = inside.granted(g.heap_at) == Arrival::yes && inside.granted(last) == Arrival::yes;
  for (i64 place : {i64{0}, g.heap_at - 1, last + 1, i64{1} << 62, i64{-64}}) {
    Alone a;
    all = all && a.granted(place) == Arrival::never && a.all_have(Fault::grant);
  }
  return all;
}
bool an_interrupt_ends_waits() {
  Alone a(std::chrono::seconds(2));
  a.host.interrupted = [] { return true; };
  return a.expect(tag(5, 3)) == Arrival::never && a.all_have(Fault::interrupted);
}

int main() {
  law("pieces are the bytes of the wire", pieces_are_the_bytes_of_the_wire);
  law("chunks cover a route once", chunks_cover_a_route_once);
  law("a flat route names the bytes of its item", a_flat_route_names_the_bytes_of_its_item);
  for (const Format& f : formats) {
    law(f.name + ": widening keeps the value", [&] { return widening_keeps_the_value(f); });
    law(f.name + ": narrowing undoes widening", [&] { return narrowing_undoes_widening(f); });
    law(f.name + ": narrowing rounds to nearest even", [&] { return narrowing_rounds_to_nearest_even(f); });
    law(f.name + ": sums are rounded once", [&] { return sums_are_rounded_once(f); });
  }
  law("a dtype is found as a constant", a_dtype_is_found_as_a_constant);
  law("sums wrap, max and min carry NaN", sums_wrap_and_extremes_carry_nan);
  law("sums are those of the reference", sums_are_those_of_the_reference);
  law("no two things share a byte", no_two_things_share_a_byte);
  law("writers do not share lines", writers_do_not_share_lines);
  law("peers see each other", peers_see_each_other);
  law("dividers divide", dividers_divide);
  law("messages go round the slots", messages_go_round_the_slots);
  law("tags compare under wrap", tags_compare_under_wrap);
  law("what has come is taken at once", what_has_come_is_taken_at_once);
  law("a wait ends at its deadline", a_wait_ends_at_its_deadline);
  law("another signature is another call", another_signature_is_another_call);
  law("another number is not this message", another_number_is_not_this_message);
  law("poison ends waits and calls", poison_ends_waits_and_calls);
  law("a post of another call ends waits", a_post_of_another_call_ends_waits);
  law("a farewell ends waits", a_farewell_ends_waits);
  law("a post of this call, or an earlier one, does not", a_post_of_this_call_or_an_earlier_one_does_not);
  law("after a look at the post the message is looked at once more", after_a_post_the_message_is_looked_at_once_more);
  law("a grant outside the heap is refused", a_grant_outside_the_heap_is_refused);
  law("an interrupt ends waits", an_interrupt_ends_waits);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace
}  // namespace purlin::test

int main() { return purlin::test::main(); }
