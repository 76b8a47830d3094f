// Reductions, the same bits everywhere: all contributions in rank order starting from the first, accumulated wide (f32 for floats of 16 and 32 bits, f64
// for f64, wrapping integers), rounded once. avg divides once. max and min propagate NaN as torch does. Compile without fused multiply-add.
#pragma once
#include "spec.hpp"

#include <cstdint>
#include <cstring>

namespace purlin::numeric {

PURLIN_FN float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
PURLIN_FN std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// IEEE 754 binary16 <-> binary32, round to nearest even.
PURLIN_FN float half_to_float(std::uint16_t half) {
  std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | rest << 13);  // infinity, NaN
  if (rest >= 0x0400u) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
  return float_of_bits(sign | bits_of_float(static_cast<float>(rest) * 0x1p-24f));  // subnormal: exact
}
PURLIN_FN std::uint16_t float_to_half(float value) {
  std::uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  std::uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x477ff000u) {  // rounds to 2^16 or is infinite
    half = 0x7c00u;
  } else if (rest >= 0x38800000u) {
    half = (rest - (112u << 23) + 0x0fffu + (rest >> 13 & 1u)) >> 13;
  } else {  // adding 0.5 puts the last bit of a subnormal half at the last bit of the float
    half = bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u;
  }
  return static_cast<std::uint16_t>(sign | half);
}
PURLIN_FN float bfloat_to_float(std::uint16_t value) { return float_of_bits(static_cast<std::uint32_t>(value) << 16); }
PURLIN_FN std::uint16_t float_to_bfloat(float value) {
  std::uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <class S, class W>
struct Plain {
  using Stored = S;
  using Wide = W;
  PURLIN_FN static W widen(S value) { return static_cast<W>(value); }
  PURLIN_FN static S narrow(W value) { return static_cast<S>(value); }
};
struct Half {
  using Stored = std::uint16_t;
  using Wide = float;
  PURLIN_FN static float widen(Stored value) { return half_to_float(value); }
  PURLIN_FN static Stored narrow(float value) { return float_to_half(value); }
};
struct Bfloat {
  using Stored = std::uint16_t;
  using Wide = float;
  PURLIN_FN static float widen(Stored value) { return bfloat_to_float(value); }
  PURLIN_FN static Stored narrow(float value) { return float_to_bfloat(value); }
};

template <Op op, class W>
PURLIN_FN W join(W a, W b) {
  if constexpr (op == Op::sum || op == Op::avg) {
    if constexpr (sizeof(W) == 8 && W(1) / W(2) == W(0)) {
      return static_cast<W>(static_cast<Word>(a) + static_cast<Word>(b));  // integers wrap
    } else {
      return a + b;
    }
  } else if constexpr (op == Op::max) {
    return b > a || b != b ? (a != a ? a : b) : a;
  } else {
    return b < a || b != b ? (a != a ? a : b) : a;
  }
}

// Calls f(a type like Half{}) for the dtype; its Stored and Wide say how elements lie and accumulate.
template <class F>
PURLIN_FN void with_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::float32: return f(Plain<float, float>{});
    case Dtype::float16: return f(Half{});
    case Dtype::bfloat16: return f(Bfloat{});
    case Dtype::float64: return f(Plain<double, double>{});
    case Dtype::int8: return f(Plain<std::int8_t, i64>{});
    case Dtype::int16: return f(Plain<std::int16_t, i64>{});
    case Dtype::int32: return f(Plain<std::int32_t, i64>{});
    case Dtype::int64: return f(Plain<std::int64_t, i64>{});
    case Dtype::uint8: return f(Plain<std::uint8_t, i64>{});
  }
}

}  // namespace purlin::numeric
