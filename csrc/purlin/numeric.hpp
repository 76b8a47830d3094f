// Reductions, the same bits everywhere: all contributions in rank order starting from the first, accumulated wide (f32 for floats of 16 and 32 bits, f64
// for f64, wrapping integers), rounded once. avg divides once. max and min propagate NaN as torch does. Compile without fused multiply-add.
#pragma once
#include "halves.hpp"
#include "spec.hpp"

#include <type_traits>

namespace purlin::numeric {

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
    if constexpr (std::is_integral_v<W>) {
      using Wrapping = std::make_unsigned_t<W>;
      return static_cast<W>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
    } else {
      return a + b;
    }
  } else if constexpr (op == Op::max) {
    return b > a || b != b ? (a != a ? a : b) : a;
  } else {
    return b < a || b != b ? (a != a ? a : b) : a;
  }
}

// How elements of a dtype lie and accumulate.
template <Dtype dtype>
struct TypeOf;
template <>
struct TypeOf<Dtype::float32> : Plain<float, float> {};
template <>
struct TypeOf<Dtype::float16> : Half {};
template <>
struct TypeOf<Dtype::bfloat16> : Bfloat {};
template <>
struct TypeOf<Dtype::float64> : Plain<double, double> {};
template <>
struct TypeOf<Dtype::int8> : Plain<std::int8_t, int> {};
template <>
struct TypeOf<Dtype::int16> : Plain<std::int16_t, int> {};
template <>
struct TypeOf<Dtype::int32> : Plain<std::int32_t, std::int32_t> {};
template <>
struct TypeOf<Dtype::int64> : Plain<std::int64_t, std::int64_t> {};
template <>
struct TypeOf<Dtype::uint8> : Plain<std::uint8_t, int> {};

// Calls f(a value of a type that holds the dtype as a constant, `value`).
template <class F>
PURLIN_FN auto with_constant(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::float32: return f(std::integral_constant<Dtype, Dtype::float32>{});
    case Dtype::float16: return f(std::integral_constant<Dtype, Dtype::float16>{});
    case Dtype::bfloat16: return f(std::integral_constant<Dtype, Dtype::bfloat16>{});
    case Dtype::float64: return f(std::integral_constant<Dtype, Dtype::float64>{});
    case Dtype::int8: return f(std::integral_constant<Dtype, Dtype::int8>{});
    case Dtype::int16: return f(std::integral_constant<Dtype, Dtype::int16>{});
    case Dtype::int32: return f(std::integral_constant<Dtype, Dtype::int32>{});
    case Dtype::int64: return f(std::integral_constant<Dtype, Dtype::int64>{});
    default: return f(std::integral_constant<Dtype, Dtype::uint8>{});
  }
}
// Calls f(a type like Half{}) for the dtype.
template <class F>
PURLIN_FN void with_dtype(Dtype dtype, F f) {
  with_constant(dtype, [&](auto constant) { f(TypeOf<decltype(constant)::value>{}); });
}

}  // namespace purlin::numeric
