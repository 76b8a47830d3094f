// Copies that write past the cache: what another core reads next is quicker to find in memory than in this core's cache, and memory that is overwritten
// whole need not be read first. Between two cores of an AMD EPYC that do not share their L3, a ring passes four times as many bytes a second.
#pragma once
#include "../portable.hpp"

#include <cstring>

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // that one does not see such stores
#define PURLIN_STREAMS 1
#include <emmintrin.h>
#endif

namespace purlin::cpu {

constexpr i64 least_streamed = 4096;  // bytes; below, the detour costs more than it saves

// Weakly ordered: settle() comes before whatever says that the bytes are there.
inline void stream(char* to, const char* from, i64 bytes) {
  i64 at = 0;
#if defined(PURLIN_STREAMS)
  constexpr i64 cell = 64;
  at = -reinterpret_cast<i64>(to) & (cell - 1);
  std::memcpy(to, from, static_cast<std::size_t>(at));
  for (; at + cell <= bytes; at += cell) {
    __m128i part[4];
    for (int i = 0; i < 4; ++i) part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, part[i]);
  }
#endif
  std::memcpy(to + at, from + at, static_cast<std::size_t>(bytes - at));
}

inline void settle() {
#if defined(PURLIN_STREAMS)
  _mm_sfence();
#endif
}

}  // namespace purlin::cpu
