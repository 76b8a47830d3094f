// 16-bit floats to and from 32 bits, round to nearest even: by the hardware where nvcc compiles for a device, by hand elsewhere; the same bits.
#pragma once
#include "portable.hpp"

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

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
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | rest << 13);  // infinity, NaN
  if (rest >= 0x0400u) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
  return float_of_bits(sign | bits_of_float(static_cast<float>(rest) * 0x1p-24f));  // subnormal: exact
#endif
}
PURLIN_FN std::uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(value));
#else
  std::uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fffu;  // NaN, as the hardware makes it
  std::uint32_t half;
  if (rest >= 0x477ff000u) {  // rounds to 2^16 or is infinite
    half = 0x7c00u;
  } else if (rest >= 0x38800000u) {
    half = (rest - (112u << 23) + 0x0fffu + (rest >> 13 & 1u)) >> 13;
  } else {  // adding 0.5 puts the last bit of a subnormal half at the last bit of the float
    half = bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u;
  }
  return static_cast<std::uint16_t>(sign | half);
#endif
}
PURLIN_FN float bfloat_to_float(std::uint16_t value) { return float_of_bits(static_cast<std::uint32_t>(value) << 16); }
PURLIN_FN std::uint16_t float_to_bfloat(float value) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  std::uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

}  // namespace purlin::numeric
