// The one home of inline assembly. Memory that a peer writes is touched through these functions or plain accesses, never through ld.global.nc.
#pragma once
#include "../channel.hpp"

namespace purlin::ptx {

// ---- words

__device__ __forceinline__ Word load_acquire(const Word* from) {
  Word value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ Word load_relaxed(const Word* from) {
  Word value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(Word* to, Word value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(Word* to, Word value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ Word exchange(Word* at, Word value) {  // first come, first served, over the link too
  Word old;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], 0, %2;" : "=l"(old) : "l"(at), "l"(value) : "memory");
  return old;
}

// ---- lines of 16 bytes: payload and tag arrive together

struct Line {
  Word payload, tag;
};
__device__ __forceinline__ Line load_line(const void* from) {
  Line line;
  asm volatile("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
               : "=l"(line.payload), "=l"(line.tag)
               : "l"(from)
               : "memory");
  return line;
}
__device__ __forceinline__ Line load_line_acquire(const void* from) {
  Line line;
  asm volatile("{ .reg .b128 v; ld.acquire.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
               : "=l"(line.payload), "=l"(line.tag)
               : "l"(from)
               : "memory");
  return line;
}
__device__ __forceinline__ void store_line(void* to, Line line) {
  asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }" ::"l"(to),
               "l"(line.payload), "l"(line.tag)
               : "memory");
}
__device__ __forceinline__ void store_line_release(void* to, Line line) {
  asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.release.sys.global.b128 [%0], v; }" ::"l"(to),
               "l"(line.payload), "l"(line.tag)
               : "memory");
}

// ---- vectors of 16 bytes, read and written once

__device__ __forceinline__ uint4 load_vector(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ void store_vector(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---- wide vectors of 32 bytes, the same (sm_100)

struct Wide {
  Word words[4];
};
__device__ __forceinline__ void load(Wide& v, const char* from) {
#if defined(PURLIN_WIDE)
  asm volatile("ld.global.v2.u64 {%0, %1}, [%4]; ld.global.v2.u64 {%2, %3}, [%4 + 16];"
               : "=&l"(v.words[0]), "=&l"(v.words[1]), "=l"(v.words[2]), "=l"(v.words[3])
               : "l"(from));
#else
  if constexpr (has_wide)
    asm volatile("ld.global.L1::no_allocate.v4.u64 {%0, %1, %2, %3}, [%4];"
                 : "=l"(v.words[0]), "=l"(v.words[1]), "=l"(v.words[2]), "=l"(v.words[3])
                 : "l"(from));
#endif
}
__device__ __forceinline__ void store(char* to, const Wide& v) {
#if defined(PURLIN_WIDE)
  asm volatile("st.global.v2.u64 [%0], {%1, %2}; st.global.v2.u64 [%0 + 16], {%3, %4};" ::"l"(to), "l"(v.words[0]),
               "l"(v.words[1]), "l"(v.words[2]), "l"(v.words[3])
               : "memory");
#else
  if constexpr (has_wide)
    asm volatile("st.global.v4.u64 [%0], {%1, %2, %3, %4};" ::"l"(to), "l"(v.words[0]), "l"(v.words[1]),
                 "l"(v.words[2]), "l"(v.words[3])
                 : "memory");
#endif
}
__device__ __forceinline__ void load(uint4& v, const char* from) { v = load_vector(from); }
__device__ __forceinline__ void store(char* to, const uint4& v) { store_vector(to, v); }

// ---- the number of a peer, in a branch that its lane alone takes

// Constants at a place that differs from lane to lane are read lane by lane, and a compiler that may read them ahead of the branch reads them for all lanes:
// half a microsecond and more.
__device__ __forceinline__ int here(int peer) {
  asm volatile("" : "+r"(peer));
  return peer;
}

// ---- the address that others are counted from

// A compiler that knows how it came about counts each of them anew, rather than say how far from here.
template <class T>
__device__ __forceinline__ T* here(T* first) {
  asm volatile("" : "+l"(first));
  return first;
}

// ---- barriers of some of a block's threads

__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {  // and go on
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ bool barrier_or(int id, int threads, bool value) {
  int any;
  asm volatile("{ .reg .pred p, q; setp.ne.s32 q, %3, 0; bar.red.or.pred p, %1, %2, q; selp.s32 %0, 1, 0, p; }"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(static_cast<int>(value))
               : "memory");
  return any != 0;
}

// ---- mbarriers: arrivals of one kind of warp, waited for by another

using Gate = unsigned long long;
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void gate_init(Gate* gate, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void gate_arrive(Gate* gate) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(shared_address(gate)) : "memory");
}
__device__ __forceinline__ bool gate_passed(Gate* gate, unsigned parity) {  // the phase of this parity is complete
  unsigned passed;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed)
               : "r"(shared_address(gate)), "r"(parity)
               : "memory");
  return passed != 0;
}

// A gate that also waits for bytes: one lane announces them, bulk loads bring them.
__device__ __forceinline__ void gate_expect(Gate* gate, unsigned bytes) {
  if constexpr (has_bulk)
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(shared_address(gate)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void fence_gates() {  // what was initialised can be used by bulk copies
  if constexpr (has_bulk) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- bulk copies (sm_90): 16-byte multiples between global and shared memory, by a machine beside the lanes, in the *async proxy*

// What was seen through plain loads and stores happens before bulk copies that follow.
__device__ __forceinline__ void fence_proxy() {
  if constexpr (has_bulk) asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, Gate* gate) {
  if constexpr (has_bulk)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(gate))
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, unsigned bytes) {
  if constexpr (has_bulk)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  if constexpr (has_bulk) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void bulk_stored() {  // all but the last `pending` groups of this lane are written
  if constexpr (has_bulk) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
template <int pending>
__device__ __forceinline__ void bulk_read() {  // all but the last `pending` groups of this lane have left shared memory
  if constexpr (has_bulk) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// ---- time

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace purlin::ptx
