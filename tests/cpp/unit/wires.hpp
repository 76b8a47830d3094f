// Wires and cursors: which bytes a route names.
#pragma once
#include "../program.hpp"
#include "law.hpp"

namespace purlin::test {
namespace {

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

void laws_of_wires() {
  law("pieces are the bytes of the wire", pieces_are_the_bytes_of_the_wire);
  law("chunks cover a route once", chunks_cover_a_route_once);
  law("a flat route names the bytes of its item", a_flat_route_names_the_bytes_of_its_item);
}

}  // namespace
}  // namespace purlin::test
