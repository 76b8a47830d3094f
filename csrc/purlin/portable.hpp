// The one home of compiler differences: these headers compile with g++ and clang++ (CPU Atoms) and with nvcc (CUDA Atoms).
#pragma once

#if defined(__CUDACC__)
#define PURLIN_FN __host__ __device__ __forceinline__
#else
#define PURLIN_FN inline
#endif

namespace purlin {

// Code for this GPU may use bulk copies (sm_90 and later).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool has_bulk = true;
#else
constexpr bool has_bulk = false;
#endif

// A lane moves 32 bytes at once (sm_100 and later; PTX of CUDA 12.9). With PURLIN_WIDE lanes of any GPU do, by two instructions: so all but the one
// instruction can be run where there is no such GPU.
#if defined(PURLIN_WIDE) || \
    (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209)
constexpr bool has_wide = true;
#else
constexpr bool has_wide = false;
#endif

using i64 = long long;
using Word = unsigned long long;  // a shared word: 8-byte aligned, lock-free, one writer

PURLIN_FN unsigned multiply_high(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
#endif
}

template <class T>
PURLIN_FN constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
PURLIN_FN constexpr T larger(T a, T b) {
  return a < b ? b : a;
}
PURLIN_FN constexpr i64 round_up(i64 value, i64 unit) { return (value + unit - 1) / unit * unit; }
PURLIN_FN constexpr i64 ceil_div(i64 value, i64 by) { return (value + by - 1) / by; }

}  // namespace purlin
