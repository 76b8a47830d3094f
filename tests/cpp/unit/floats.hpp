// 16-bit floats, and sums of every dtype.
#pragma once
#include "../program.hpp"
#include "law.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace purlin::test {
namespace {

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

void laws_of_floats() {
  for (const Format& f : formats) {
    law(f.name + ": widening keeps the value", [&] { return widening_keeps_the_value(f); });
    law(f.name + ": narrowing undoes widening", [&] { return narrowing_undoes_widening(f); });
    law(f.name + ": narrowing rounds to nearest even", [&] { return narrowing_rounds_to_nearest_even(f); });
    law(f.name + ": sums are rounded once", [&] { return sums_are_rounded_once(f); });
  }
  law("a dtype is found as a constant", a_dtype_is_found_as_a_constant);
  law("sums wrap, max and min carry NaN", sums_wrap_and_extremes_carry_nan);
  law("sums are those of the reference", sums_are_those_of_the_reference);
}

}  // namespace
}  // namespace purlin::test
