// A Shape as every rank plans it: tensors laid out at random, different on every rank, and what every byte of them must be after the call.
#pragma once
#include "shape.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>

namespace purlin::test {

enum class Area { heap, own };  // of the arena, where it can be granted; or memory that no peer knows

struct Region {  // a tensor
  Area area;
  i64 at = 0;  // in its area
  std::vector<char> before, after;
};

struct Part {  // a call as one rank plans it
  Call call{};
  std::vector<Region> regions;
  std::vector<int> inputs, outputs;  // regions
  i64 heap_bytes = 0, own_bytes = 0;
};

struct Built {
  Shape shape;
  std::vector<Part> part;               // by rank
  std::deque<std::vector<Item>> items;  // what the routes point to
};

class Builder {
 public:
  Builder(const Shape& shape, const Limits& limits, Wires wires)
      : s_(shape), limits_(limits), wires_(wires), random_(shape.layout), built_(std::make_unique<Built>()) {
    built_->shape = shape;
    built_->part.resize(static_cast<size_t>(limits.ranks));
    bool granted = s_.regime == Regime::direct;
    bool in_place = s_.form == Form::in_place, lends_in = s_.lends_inputs(), lends_out = s_.lends() && !lends_in;
    int most = lends_out || (lends_in && in_place) ? 1 : granted ? max_grants : 3;
    int outputs = static_cast<int>(random_.between(1, most));  // the same on all ranks, for they count grants
    Shape in = s_, out = s_;
    in.plain = in.plain || lends_in || (lends_out && in_place);
    out.plain = out.plain || lends_out;
    for (int r = 0; r < limits.ranks; ++r) {
      in_.emplace_back(random_, in_place ? outputs : static_cast<int>(random_.between(1, lends_in ? 1 : 3)), in);
      out_.emplace_back(random_, outputs, out);
    }
  }
  std::unique_ptr<Built> build() {
    switch (s_.kind) {
      case Kind::copy: s_.form == Form::in_place ? gather_in_place() : copy(); break;
      case Kind::reduce: reduce(); break;
      case Kind::all_reduce: all_reduce(); break;
    }
    for (int r = 0; r < limits_.ranks; ++r) {
      place(r);
      agree(r);
    }
    for (auto& act : values_) act();
    return std::move(built_);
  }

 private:
  using Boxes = const std::vector<Item>*;  // one side of a wire

  Part& part(int r) { return built_->part[static_cast<size_t>(r)]; }
  Pair& pair(int r, int other) { return part(r).call.pair[(other - r - 1 + limits_.ranks) % limits_.ranks]; }
  Shelf& in(int r) { return in_[static_cast<size_t>(r)]; }
  // In place or not is every rank's own business in an all-reduce in one exchange.
  bool in_place(int r) const {
    return s_.form == Form::in_place && !(s_.in_one_exchange() && (s_.layout >> r & 1) != 0);
  }
  Shelf& out(int r) { return in_place(r) ? in(r) : out_[static_cast<size_t>(r)]; }
  Wire wire(i64 elements) { return test::wire(random_, s_, limits_, elements, wires_); }
  Boxes lay(Shelf& shelf, const Wire& w) {
    std::vector<Item> items;
    for (Range span : w.spans) items.push_back({span.lo, span.hi - span.lo, shelf.lay(span.hi - span.lo, s_.unit)});
    return &built_->items.emplace_back(std::move(items));
  }
  Route route(Boxes boxes, const Wire& w) {
    Route route{boxes->data(), static_cast<int>(boxes->size()), w.lo, w.bytes, w.chunk};
    if (wires_ == Wires::loose && random_.chance(50)) flatten(route);
    return route;
  }
  // Nothing of the route may lie outside its one item.
  static void flatten(Route& route) {
    if (route.count != 1 || route.items->box.dims > 0) return;
    const Item& item = *route.items;
    if (route.lo < item.at || route.lo + route.bytes > item.at + item.bytes) return;
    route.offset = item.box.offset - item.at;
    route.tensor = item.box.tensor;
    route.count = 0;
  }

  void connect(int source, int reader, Route from, Route to) {
    if (source == reader) {
      part(source).call.own_from = from;
      part(source).call.own_to = to;
    } else {
      pair(source, reader).send = from;
      if (!s_.lends()) pair(source, reader).remote = to;
      pair(reader, source).receive = to;
    }
  }

  void borrow(int reader, int owner, Route slice) {
    if (wires_ == Wires::loose) flatten(slice);
    pair(reader, owner).remote = slice;
  }

  void copy() {
    for (int s = 0; s < limits_.ranks; ++s)
      for (int d = 0; d < limits_.ranks; ++d) {
        Wire w = wire(s_.elements[s][d]);
        Boxes from = lay(in(s), w), to = lay(out(d), w);
        connect(s, d, route(from, w), route(to, w));
        values_.push_back([this, s, d, from, to] { move(s, from, d, to); });
      }
  }
  void gather_in_place() {  // every rank's input is its own shard of its output
    for (int s = 0; s < limits_.ranks; ++s) {
      Wire w = wire(s_.elements[s][0]);
      std::vector<Boxes> shard;
      for (int d = 0; d < limits_.ranks; ++d) shard.push_back(lay(in(d), w));
      Boxes from = shard[static_cast<size_t>(s)];
      for (int d = 0; d < limits_.ranks; ++d) {
        Boxes to = shard[static_cast<size_t>(d)];
        connect(s, d, route(from, w), route(to, w));
        values_.push_back([this, s, d, from, to] { move(s, from, d, to); });
      }
    }
  }
  void reduce() {
    for (int d = 0; d < limits_.ranks; ++d) {
      Wire w = wire(s_.elements[0][d]);
      std::vector<Boxes> from;
      for (int s = 0; s < limits_.ranks; ++s) from.push_back(lay(in(s), w));
      Boxes to = s_.form == Form::in_place ? from[static_cast<size_t>(d)] : lay(out(d), w);
      for (int s = 0; s < limits_.ranks; ++s) connect(s, d, route(from[static_cast<size_t>(s)], w), route(to, w));
      for (int s = 0; s_.lends() && s < limits_.ranks; ++s)
        if (s != d) borrow(d, s, route(from[static_cast<size_t>(s)], w));
      values_.push_back([this, from, d, to] { sum(from, {d}, {to}); });
    }
  }
  void all_reduce() {
    Wire w = wire(s_.elements[0][0]);
    std::vector<Boxes> from, to;
    std::vector<int> all;
    for (int r = 0; r < limits_.ranks; ++r) {
      all.push_back(r);
      from.push_back(lay(in(r), w));
      to.push_back(in_place(r) ? from.back() : lay(out(r), w));
    }
    i64 at = w.lo, end = w.lo + w.bytes;
    for (int d = 0; d < limits_.ranks; ++d) {  // rank d sums slice d; in one shot everybody sums everything
      Wire mine = w;
      if (s_.regime != Regime::packet && !s_.in_one_exchange()) {
        i64 even = w.lo + w.bytes * (d + 1) / limits_.ranks;
        mine.lo = at;
        at = d + 1 == limits_.ranks || random_.chance(10) ? end : larger(at, smaller(end, round_up(even, 16)));
        mine.bytes = at - mine.lo;
        mine.chunk = cut(random_, s_, limits_, mine.bytes);
      }
      for (int s = 0; s < limits_.ranks; ++s) {
        Route input = route(from[static_cast<size_t>(s)], mine), output = route(to[static_cast<size_t>(s)], mine);
        if (s != d && s_.lends()) borrow(d, s, output);
        if (s == d) {
          part(s).call.own_from = input;
          part(s).call.own_to = output;
        } else {
          pair(s, d).send = input;
          pair(s, d).receive = output;
        }
      }
    }
    values_.push_back([this, from, to, all] { sum(from, all, to); });
  }

  // -- memory
  void place(int r) {
    Part& p = part(r);
    Area outputs = s_.regime == Regime::direct || random_.chance(30) ? Area::heap : Area::own;
    if (!in_place(r)) p.inputs = place(p, in(r), s_.lends_inputs() ? Area::heap : Area::own, s_.grain);
    // Where a peer's outputs begin is nothing that ranks agree on.
    bool own_grain = s_.form == Form::apart && s_.kind == Kind::copy && random_.chance(25);
    p.outputs = place(p, out(r), outputs, own_grain ? i64{1} << random_.below(4) : s_.grain);
    if (in_place(r)) p.inputs = p.outputs;
  }
  std::vector<int> place(Part& p, const Shelf& shelf, Area area, i64 grain) {
    std::vector<int> regions;
    i64& end = area == Area::heap ? p.heap_bytes : p.own_bytes;
    for (int k = 0; k < shelf.tensors(); ++k) {
      Region region{area, round_up(end + random_.below(40), grain), {}, {}};
      region.before.resize(static_cast<size_t>(shelf.bytes(k) + random_.below(9)));
      for (char& c : region.before) c = static_cast<char>(random_.next());
      region.after = region.before;
      end = region.at + static_cast<i64>(region.before.size()) + 16;
      regions.push_back(static_cast<int>(p.regions.size()));
      p.regions.push_back(std::move(region));
    }
    return regions;
  }

  // -- the call, without addresses
  void agree(int r) {
    Call& c = part(r).call;
    c.kind = s_.in_one_exchange() ? Kind::reduce : s_.kind;
    c.onto_sent = s_.in_one_exchange() && in_place(r);
    c.regime = s_.regime;
    c.sum = s_.sum;
    c.rank = r;
    c.ranks = limits_.ranks;
    c.teams = s_.teams;
    c.lag = s_.lag;
    c.grants = s_.lends() ? 1 : s_.regime == Regime::direct ? out(r).tensors() : 0;
    c.signature = s_.signature;
    c.steps = c.own_from.messages(0, c.teams);
    for (int p = 0; p < c.peers(); ++p) {
      Pair& pair = c.pair[p];
      c.steps = larger(c.steps, larger(pair.send.messages(0, c.teams), pair.receive.messages(0, c.teams)));
      pair.send_signature = signature(r, c.rank_of(p));
      pair.receive_signature = signature(c.rank_of(p), r);
      if (c.grants > 0) pair.reach = reach(pair.remote, c.grants);
    }
  }
  // Bytes that each granted output has at least, if the route lies in them.
  static i64 reach(const Route& route, int grants) {
    std::vector<i64> needed(static_cast<size_t>(grants));
    if (route.flat() && route.bytes > 0)
      needed[static_cast<size_t>(route.tensor)] = route.offset + route.lo + route.bytes;
    for (int i = 0; i < route.count; ++i) {
      i64& bytes = needed[static_cast<size_t>(route.items[i].box.tensor)];
      bytes = larger(bytes, place_of(route.items[i].box, route.items[i].bytes - 1) + 1);
    }
    return *std::min_element(needed.begin(), needed.end());
  }
  unsigned signature(int source, int reader) const {
    return static_cast<unsigned>(Random(s_.signature * 64ull + static_cast<Word>(source * 8 + reader)).next()) &
           signature_mask;
  }

  // -- values
  char* element(Part& p, const std::vector<int>& tensors, const Item& item, i64 byte,
                std::vector<char> Region::* image) {
    Region& region = p.regions[static_cast<size_t>(tensors[static_cast<size_t>(item.box.tensor)])];
    return (region.*image).data() + place_of(item.box, byte);
  }
  void move(int s, Boxes from, int d, Boxes to) {
    for (size_t k = 0; k < from->size(); ++k)
      for (i64 i = 0; i < (*from)[k].bytes; i += s_.unit)
        std::memcpy(element(part(d), part(d).outputs, (*to)[k], i, &Region::after),
                    element(part(s), part(s).inputs, (*from)[k], i, &Region::before), static_cast<size_t>(s_.unit));
  }
  void sum(const std::vector<Boxes>& from, const std::vector<int>& readers, const std::vector<Boxes>& to) {
    for (size_t k = 0; k < from[0]->size(); ++k)
      for (i64 i = 0; i < (*from[0])[k].bytes; i += s_.unit) {
        std::vector<const char*> all;
        for (size_t s = 0; s < from.size(); ++s) {
          Part& p = part(static_cast<int>(s));
          char* before = element(p, p.inputs, (*from[s])[k], i, &Region::before);
          draw(random_, s_.sum, before);
          std::memcpy(element(p, p.inputs, (*from[s])[k], i, &Region::after), before, static_cast<size_t>(s_.unit));
          all.push_back(before);
        }
        for (size_t d = 0; d < readers.size(); ++d) {
          Part& p = part(readers[d]);
          fold(s_.sum, all, element(p, p.outputs, (*to[d])[k], i, &Region::after));
        }
      }
  }

  const Shape s_;
  const Limits limits_;
  const Wires wires_;
  Random random_;
  std::unique_ptr<Built> built_;
  std::deque<Shelf> in_, out_;
  std::vector<std::function<void()>> values_;
};

}  // namespace purlin::test
