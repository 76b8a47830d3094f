// Contributions added in registers, element by element, in rank order, wide, rounded once.
//
// A vector's elements are cut out of its 32-bit words by shifts: a union, or any address taken, would send each load through memory.
#pragma once
#include "../numeric.hpp"

#include <bit>

namespace purlin::gpu {

template <int bytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  using type = std::uint8_t;
};
template <>
struct BitsOf<2> {
  using type = std::uint16_t;
};
template <>
struct BitsOf<4> {
  using type = std::uint32_t;
};
template <>
struct BitsOf<8> {
  using type = std::uint64_t;
};

template <class V>
struct InWords;  // a vector as 32-bit words
template <>
struct InWords<uint4> {
  static constexpr int count = 4;
  PURLIN_FN static unsigned get(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  PURLIN_FN static uint4 make(const unsigned (&w)[4]) { return {w[0], w[1], w[2], w[3]}; }
};
template <>
struct InWords<Word> {
  static constexpr int count = 2;
  PURLIN_FN static unsigned get(Word v, int i) { return static_cast<unsigned>(i == 0 ? v : v >> 32); }
  PURLIN_FN static Word make(const unsigned (&w)[2]) { return static_cast<Word>(w[1]) << 32 | w[0]; }
};

// Out of line: a division takes many instructions, and only averages make one.
template <class Wide>
__host__ __device__ __noinline__ Wide divided(Wide value, int by) {
  return value / static_cast<Wide>(by);
}

// The elements of a V (a vector, or one element), accumulated. Sums (and averages: a sum, divided once) and extremes are two loops; max and min differ by a
// select, so that fewer of them are compiled.
template <class T, bool extreme, class V>
struct Fold {
  using Stored = typename T::Stored;
  using Wide = typename T::Wide;
  using Bits = typename BitsOf<sizeof(Stored)>::type;
  static constexpr int size = sizeof(Stored), elements = sizeof(V) / size;
  Wide wide[elements];

  PURLIN_FN void first(const V& value) {
#pragma unroll
    for (int e = 0; e < elements; ++e) wide[e] = T::widen(element(value, e));
  }
  PURLIN_FN void next(const V& value, Op op) {
#pragma unroll
    for (int e = 0; e < elements; ++e) {
      Wide more = T::widen(element(value, e));
      if constexpr (extreme) {
        wide[e] = op == Op::max ? numeric::join<Op::max>(wide[e], more) : numeric::join<Op::min>(wide[e], more);
      } else {
        wide[e] = numeric::join<Op::sum>(wide[e], more);
      }
    }
  }
  PURLIN_FN void halve() {
#pragma unroll
    for (int e = 0; e < elements; ++e) wide[e] = wide[e] * static_cast<Wide>(0.5f);
  }
  PURLIN_FN V rounded(Op op, int n) const {
    if constexpr (std::is_same_v<V, Stored>) {
      return narrow(0, op, n);
    } else {
      unsigned words[InWords<V>::count] = {};
#pragma unroll
      for (int e = 0; e < elements; ++e) {
        Bits bits = std::bit_cast<Bits>(narrow(e, op, n));
        if constexpr (size == 8) {
          words[2 * e] = static_cast<unsigned>(bits);
          words[2 * e + 1] = static_cast<unsigned>(bits >> 32);
        } else {
          words[e * size / 4] |= static_cast<unsigned>(bits) << (e * size % 4 * 8);
        }
      }
      return InWords<V>::make(words);
    }
  }

 private:
  PURLIN_FN static Stored element(const V& value, int e) {
    if constexpr (std::is_same_v<V, Stored>) {
      return value;
    } else if constexpr (size == 8) {
      Bits low = InWords<V>::get(value, 2 * e), high = InWords<V>::get(value, 2 * e + 1);
      return std::bit_cast<Stored>(static_cast<Bits>(high << 32 | low));
    } else {
      return std::bit_cast<Stored>(static_cast<Bits>(InWords<V>::get(value, e * size / 4) >> (e * size % 4 * 8)));
    }
  }
  PURLIN_FN Stored narrow(int e, Op op, int n) const {
    Wide value = wide[e];
    if constexpr (!extreme && !std::is_integral_v<Wide>)
      if (op == Op::avg) value = divided(value, n);
    return T::narrow(value);
  }
};

// The dtypes that models are made of: several in a vector, wide as float.
PURLIN_FN constexpr bool adds_in_vectors(Dtype dtype) {
  return dtype == Dtype::float32 || dtype == Dtype::float16 || dtype == Dtype::bfloat16;
}
PURLIN_FN bool is_extreme(Op op) { return op == Op::max || op == Op::min; }

// What a kernel adds: one dtype, sums or extremes; or nothing, for it copies.
template <Dtype which, bool extremes>
struct Adds {
  static constexpr bool extreme = extremes;
  static constexpr Dtype dtype = which;
  using T = numeric::TypeOf<which>;
};
struct AddsAny {};  // whichever it is told: less to compile, a call more
struct Copies {};

// Two contributions, the lower rank's first.
template <class A, class V>
PURLIN_FN V added(const V& first, const V& second, Op op) {
  Fold<typename A::T, A::extreme, V> fold;
  fold.first(first);
  fold.next(second, op);
  if constexpr (adds_in_vectors(A::dtype)) {
    if (op == Op::avg) fold.halve();  // as exact as a division
    return fold.rounded(Op::sum, 2);
  } else {
    return fold.rounded(op, 2);
  }
}

// Calls f(Adds<...>{}) for what is added.
template <class A, class F>
PURLIN_FN void with_adds(Sum sum, F f) {
  if constexpr (std::is_same_v<A, AddsAny>) {
    numeric::with_constant(sum.dtype, [&](auto dtype) {
      if (is_extreme(sum.op)) {
        f(Adds<dtype.value, true>{});
      } else {
        f(Adds<dtype.value, false>{});
      }
    });
  } else if constexpr (!std::is_same_v<A, Copies>) {
    f(A{});
  }
}

}  // namespace purlin::gpu
