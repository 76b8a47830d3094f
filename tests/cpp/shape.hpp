// What ranks agree on in a random call (Shape), and the pieces it is built of: boxes in tensors, wires, values. place_of and fold are the reference: byte by
// byte and element by element, with nothing of the protocol in them.
#pragma once
#include "purlin/atom/random.hpp"
#include "purlin/numeric.hpp"

#include <cstring>
#include <string>
#include <vector>

namespace purlin::test {

using model::Random;
using std::size_t;

constexpr int most_ranks = 8;

enum class Form { apart, in_place };

struct Limits {  // what a communicator of the test can carry
  int ranks, teams, slots;
  i64 slot_bytes, window_bytes;
};

struct Shape {
  Kind kind;
  Regime regime;
  Form form;
  int teams, lag;
  Sum sum;
  i64 unit;                              // bytes of an element
  i64 elements[most_ranks][most_ranks];  // [source][reader]; sums and gathers use the first row
  unsigned signature;
  Word layout;         // seed of everything that ranks need not agree on
  i64 grain = 1;       // tensors, boxes and strides begin at multiples of it
  bool plain = false;  // one stretch a route
  bool joined = true;  // an all-reduce through rings, if it is one

  bool lends() const { return regime == Regime::direct && kind != Kind::copy; }  // a tensor of one stretch
  bool in_one_exchange() const { return !joined && kind == Kind::all_reduce && regime == Regime::staged; }
  bool lends_inputs() const { return lends() && kind == Kind::reduce; }
};

// ---- where things lie -----------------------------------------------------------------------------------------------------------------------------------

inline i64 place_of(const Box& box, i64 byte) {
  i64 run = byte / box.run, place = box.offset + byte % box.run;
  for (int d = box.dims - 1; d >= 0; --d) {
    place += run % box.extent[d] * box.stride[d];
    run /= box.extent[d];
  }
  return place;
}

// Some tensors of one rank, in which boxes are laid out one behind the other.
class Shelf {
 public:
  Shelf(Random& random, int tensors, const Shape& shape) : random_(random), grain_(shape.grain), plain_(shape.plain) {
    for (int k = 0; k < tensors; ++k) ends_.push_back(round_up(random.below(20), grain_));
  }
  Box lay(i64 bytes, i64 unit) {
    if (bytes % grain_ == 0) unit = larger(unit, grain_);
    Box box{};
    box.tensor = static_cast<int>(random_.below(static_cast<i64>(ends_.size())));
    i64& end = ends_[static_cast<size_t>(box.tensor)];
    box.offset = round_up(end + random_.below(3) * unit, grain_);
    i64 rest = bytes / unit;
    while (!plain_ && box.dims < 3 && random_.chance(60)) {
      i64 factor = random_.between(2, 4);
      if (rest % factor) break;
      rest /= factor;
      box.extent[box.dims++] = factor;
    }
    box.run = rest * unit;
    i64 span = box.run;
    int order[3] = {0, 1, 2};
    for (int d = box.dims; d > 1; --d) std::swap(order[d - 1], order[random_.below(d)]);
    for (int k = 0; k < box.dims; ++k) {
      int d = order[k];
      box.stride[d] = round_up(span + random_.below(3) * unit, grain_);
      span += (box.extent[d] - 1) * box.stride[d];
    }
    end = box.offset + span;
    measure(box);
    return box;
  }
  int tensors() const { return static_cast<int>(ends_.size()); }
  i64 bytes(int tensor) const { return ends_[static_cast<size_t>(tensor)]; }

 private:
  Random& random_;
  const i64 grain_;
  const bool plain_;
  std::vector<i64> ends_;
};

enum class Wires {  // how they are written
  loose,            // with gaps of whole lines; what has one stretch is a flat route, at times
  planned           // as planning does: fewer than 16 bytes between two items, none before the first, all in items
};

struct Wire {  // what both sides of a pair count alike
  std::vector<Range> spans;
  i64 lo = 0, bytes = 0, chunk = 16;
};

inline i64 cut(Random& random, const Shape& shape, const Limits& limits, i64 bytes) {
  if (shape.regime == Regime::staged) return 16 * random.between(1, limits.slot_bytes / 16);
  i64 even = larger<i64>(16, round_up(ceil_div(bytes, shape.teams), 16)), longer = even + 16 * random.below(2);
  return shape.regime == Regime::direct || longer <= limits.window_bytes ? longer : even;
}
inline Wire wire(Random& random, const Shape& shape, const Limits& limits, i64 elements, Wires wires) {
  Wire w;
  i64 most = shape.regime == Regime::packet ? shape.teams * limits.window_bytes : i64{1} << 40;
  elements = smaller(elements, most / shape.unit);
  bool tight = shape.plain || shape.lends() || elements * shape.unit + 96 > most;  // one item, or no room for more
  bool gaps = wires == Wires::loose && !tight;
  i64 at = gaps ? 16 * random.below(3) : 0;
  w.lo = random.chance(50) ? at : 0;
  for (int k = 0; k < 3 && elements > 0; ++k) {
    i64 here = tight || k == 2 || random.chance(40) ? elements : random.between(1, elements);
    w.spans.push_back({at, at + here * shape.unit});
    w.bytes = w.spans.back().hi - w.lo;
    at = round_up(w.spans.back().hi, 16) + (gaps ? 16 * random.below(2) : 0);
    elements -= here;
  }
  w.chunk = cut(random, shape, limits, w.bytes);
  return w;
}

// ---- values ---------------------------------------------------------------------------------------------------------------------------------------------

// Small floats of many magnitudes, so that another order gives other bits; any bits for integers.
inline void draw(Random& random, Sum sum, char* to) {
  double value = (random.unit() - 0.5) * static_cast<double>(1 << random.below(12));
  bool nan = (sum.op == Op::max || sum.op == Op::min) && random.chance(2);
  numeric::with_dtype(sum.dtype, [&](auto type) {
    using T = decltype(type);
    using Wide = typename T::Wide;
    auto one = Wide(1) / Wide(2) == Wide(0) ? static_cast<typename T::Stored>(random.next())
                                            : T::narrow(nan ? Wide(0) / Wide(0 * value) : static_cast<Wide>(value));
    std::memcpy(to, &one, sizeof one);
  });
}
inline void fold(Sum sum, const std::vector<const char*>& from, char* to) {
  numeric::with_dtype(sum.dtype, [&](auto type) {
    using T = decltype(type);
    typename T::Wide total{};
    for (size_t k = 0; k < from.size(); ++k) {
      typename T::Stored one;
      std::memcpy(&one, from[k], sizeof one);
      auto next = T::widen(one);
      switch (k == 0 ? Op::avg : sum.op) {
        case Op::avg: total = k == 0 ? next : numeric::join<Op::sum>(total, next); break;
        case Op::sum: total = numeric::join<Op::sum>(total, next); break;
        case Op::max: total = numeric::join<Op::max>(total, next); break;
        case Op::min: total = numeric::join<Op::min>(total, next); break;
      }
    }
    if (sum.op == Op::avg) total = total / static_cast<typename T::Wide>(from.size());
    typename T::Stored result = T::narrow(total);
    std::memcpy(to, &result, sizeof result);
  });
}
inline i64 bytes_of(Dtype dtype) {
  i64 bytes = 0;
  numeric::with_dtype(dtype, [&](auto type) { bytes = sizeof(typename decltype(type)::Stored); });
  return bytes;
}

// ---- a shape ----------------------------------------------------------------------------------------------------------------------------------------------

inline i64 draw_elements(Random& random, i64 most) {
  if (random.chance(25)) return 0;
  i64 n = 1;
  while (n < most && random.chance(75)) n *= random.between(2, 4);
  return smaller(n, most);
}
inline Shape draw_shape(Random& random, const Limits& limits, Regime regime, i64 most_bytes) {
  Shape s{};
  s.regime = regime;
  s.kind = static_cast<Kind>(random.below(3));
  s.form = random.chance(30) ? Form::in_place : Form::apart;
  s.teams = static_cast<int>(random.between(1, limits.teams));
  s.lag = static_cast<int>(random.below(limits.slots));
  s.sum.dtype = static_cast<Dtype>(random.below(9));
  bool whole = s.sum.dtype >= Dtype::int8;
  s.sum.op = static_cast<Op>(random.below(4));
  if (whole && s.sum.op == Op::avg) s.sum.op = Op::sum;
  s.unit = s.kind == Kind::copy ? i64{1} << random.below(4) : bytes_of(s.sum.dtype);
  for (int source = 0; source < limits.ranks; ++source)
    for (int reader = 0; reader < limits.ranks; ++reader)
      s.elements[source][reader] = draw_elements(random, most_bytes / s.unit);
  s.joined = random.chance(50);
  s.signature = static_cast<unsigned>(random.next()) & signature_mask;
  s.layout = random.next();
  return s;
}

}  // namespace purlin::test
