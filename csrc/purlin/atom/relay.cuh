// Relay: two warps a role carry bytes by bulk copies (sm_90 and later): tensor or slot -> a cell of shared memory -> slot or tensor.
//     loader  waits for all words but grants, and loads pieces into free cells                            -> full[cell]
//     storer  waits for grants, stores full cells, tells the notifies when what they publish is there     -> empty[cell]
// Both walk through the same role; what is in flight between them hides what each step takes. What bulk copies cannot load (odd addresses, the last few bytes
// of an item) passes the cells as a piece of none, and the storer's lanes copy it; so they do where bulk copies cannot store what was loaded.
#pragma once
#include "lanes.cuh"
#include "tally.cuh"

namespace purlin::gpu {

constexpr int cell_bytes = 16 << 10, cells = 6;  // of a role
constexpr int unread = 2;  // stores that may still read their cell when a piece before them gives up its own
constexpr int relay_threads = 2 * warp;  // of a role

struct Cells {  // of one role, in shared memory, beside its bytes
  ptx::Gate full[cells], empty[cells];
  int failed;

  __device__ void init() {
    for (int k = 0; k < cells; ++k) {
      ptx::gate_init(full + k, 1);
      ptx::gate_init(empty + k, 1);
    }
    failed = 0;
    ptx::fence_gates();
  }
};

// ---- stretches as bulk copies see them

// Can they carry these bytes of it? All but the last few of a flat one.
__device__ __forceinline__ bool is_even(const Stretch& s, i64 lo, i64 hi) {
  if (s.flat()) return ((bits(s.first) + static_cast<unsigned long long>(lo)) & 15) == 0;
  return ((lo | hi) & 15) == 0 && hi < most_bytes && s.aligned();
}
// Calls f(address, offset from `lo`, bytes) for each run that lies together, shared out among the lanes of a warp.
template <class F>
__device__ __forceinline__ void for_each_run(const Stretch& s, i64 lo, i64 hi, int lane, F f) {
  if (s.flat()) {
    if (lane == 0) f(s.first + lo, 0u, static_cast<unsigned>(hi - lo));
    return;
  }
  i64 run = s.box->run;
  unsigned row = s.box->by_run.divide(static_cast<unsigned>(lo / vector_bytes)) + static_cast<unsigned>(lane);
#pragma unroll 1
  for (i64 begin = row * run; begin < hi; begin += warp * run, row += warp) {
    i64 from = larger(lo, begin), to = smaller(hi, begin + run);
    f(s.row_at(row) + (from - begin), static_cast<unsigned>(from - lo), static_cast<unsigned>(to - from));
  }
}

// ---- the Atom

class Relay : public RingHands {
 public:
  // `thread` of relay_threads of role `role`, whose are `x` and the bytes of its cells, `memory`.
  __device__ Relay(const Launch& launch, int team, int role, int thread, Cells* x, char* memory, const Tally* tally)
      : RingHands(launch, team, role, thread, tally),
        loads_(thread < warp),
        lane_(thread % warp),
        x_(x),
        memory_(memory) {}

  // Hands that carry take no turns: there are three roles where the team has three blocks.
  template <class G, class C, class S>
  __device__ void three(int, G gather, C consume, S stage) {
    if (role_ == stages) {
      play(stage);
    } else if (role_ == consumes) {
      play(consume);
    } else if (role_ == gathers) {
      play(gather);
    }
  }

  // Where an item lies is found out once for all of its pieces: by a warp, it takes as long as a piece does.
  __device__ void copy(const Place& to, const Place& from, Range range) {
    for_each_item(to, from, range, [&](int k, i64 at, i64 lo, i64 hi) {
      Stretch here = stretch(from, k, at), there = loads_ && to.shared ? here : stretch(to, k, at);
      if (to.shared || there.first != here.first) carry_all(there, here, lo, hi);  // but in place
    });
  }
  template <class T, class F>
  __device__ void reduce(int, T, const Place&, int, F, int, Range, Sum) {}  // Apart
  template <class F>
  __device__ void notify(int n, F mark) {
    if (loads_ || dead_) return;
    tell_noted();
    note_ = lane_ < n ? mark(ptx::here(lane_)) : Mark{};
    noted_ = true;
    due_ = pieces_;
  }
  template <class F>
  __device__ void tell(int n, F mark) {
    if (loads_) store_marks(n, mark, lane_, ptx::store_relaxed);
  }
  template <class F>
  __device__ void grant(int n, F line) {
    if (loads_) store_grants(n, line, lane_, ptx::store_line);
  }
  template <class F>
  __device__ void keep(int n, F mark) {
    if (loads_) store_marks(n, mark, lane_, keep_word);
  }
  template <class F>
  __device__ Arrival wait(int n, F mark, Where where) {
    if (!loads_) return has_failed() ? Arrival::never : Arrival::yes;
    Mark m = lane_ < n ? mark(ptx::here(lane_)) : Mark{};
    if (m.word == counted_ && m.value <= count_) m.word = nullptr;  // a count only grows: what was seen may be enough
    Word seen = 0;
    bool bad = !reached_gently(l_, team_, m, lane_, where, seen);
    if (m.word) counted_ = m.word, count_ = seen;
    return verdict(bad);
  }
  template <class F>
  __device__ Arrival expect(int n, F mark, Where where) {
    if (where.what == Where::What::grant) return expect_grants(n, mark, where);
    // Of one mark a peer, without a loop: one around this wait cost each chunk of a ring 0.7 us.
    bool bad = loads_ && lane_ < n && !tagged_gently(l_, team_, mark(ptx::here(lane_)), lane_, where);
    return loads_ ? verdict(bad) : has_failed() ? Arrival::never : Arrival::yes;
  }
  __device__ void drain() {
    if (loads_) {
      settle();
    } else {
      ptx::bulk_stored<0>();
      tell_noted();
    }
    ptx::barrier(role_barrier(), relay_threads);
  }

 private:
  // A grant says where to: who stores waits for it. Who loads goes ahead as far as there are cells.
  template <class F>
  __device__ Arrival expect_grants(int n, F mark, Where where) {
    if (loads_) return Arrival::yes;
    tell_all();
    bool bad = false;
    for (int i = lane_; i < n; i += warp)
      bad |= !tagged_gently(l_, team_, mark(ptx::here(i)), l_.call.peer_of_mark(i), where);
    return verdict(bad);
  }

  // -- pieces: number k goes through cell k % cells. How bytes are cut into them, `from` alone decides: who loads may not know yet where they go.
  __device__ void carry_all(const Stretch& to, const Stretch& from, i64 lo, i64 hi) {
    i64 whole = is_even(from, lo, hi) ? lo + ((hi - lo) & ~i64{15}) : lo;
    if (loads_) {
#pragma unroll 1
      for (; lo < whole; lo += cell_bytes) load(from, lo, smaller(whole, lo + cell_bytes));
      if (whole < hi) load_nothing();
    } else {
      bool bulk = is_even(to, lo, whole);
#pragma unroll 1
      for (; bulk && lo < whole; lo += cell_bytes) store(to, lo, smaller(whole, lo + cell_bytes));
#pragma unroll 1
      for (; lo < whole; lo += cell_bytes) copy_past(to, from, lo, smaller(whole, lo + cell_bytes));
      if (whole < hi) copy_past(to, from, whole, hi);
    }
  }
  __device__ void load(const Stretch& from, i64 lo, i64 hi) {
    unsigned k = pieces_++, cell = k % cells;
    if (!is_free(k)) return;
    if (lane_ == 0) ptx::gate_expect(x_->full + cell, static_cast<unsigned>(hi - lo));
    __syncwarp();
    for_each_run(from, lo, hi, lane_, [&](char* at, unsigned offset, unsigned count) {
      ptx::bulk_load(memory_ + cell * cell_bytes + offset, at, count, x_->full + cell);
    });
    loaded_ = pieces_;
  }
  __device__ void load_nothing() {
    unsigned k = pieces_++;
    if (!is_free(k)) return;
    if (lane_ == 0) ptx::gate_arrive(x_->full + k % cells);
    __syncwarp();
    loaded_ = pieces_;
  }
  __device__ void store(const Stretch& to, i64 lo, i64 hi) {
    unsigned k = pieces_++;
    const char* bytes = memory_ + k % cells * cell_bytes;
    if (!is_full(k)) return;
    for_each_run(to, lo, hi, lane_,
                 [&](char* at, unsigned offset, unsigned count) { ptx::bulk_store(at, bytes + offset, count); });
    give_up(k);
  }
  // Past the cell, whatever it holds.
  __device__ void copy_past(const Stretch& to, const Stretch& from, i64 lo, i64 hi) {
    unsigned k = pieces_++;
    if (!is_full(k)) return;
    copy_stretch(to, from, lo, hi, {lane_, warp});
    give_up(k);
  }
  // Whatever has failed: nothing is on its way into a cell that the next block may be given.
  __device__ void settle() const {
    for (unsigned k = loaded_ > cells ? loaded_ - cells : 0; k < loaded_; ++k)
      while (!ptx::gate_passed(x_->full + k % cells, k / cells & 1)) {}
  }
  __device__ bool is_free(unsigned k) {
    dead_ = dead_ || (k >= cells && !passes(x_->empty + k % cells, k / cells - 1));
    return !dead_;
  }
  __device__ bool is_full(unsigned k) {
    ptx::Gate* gate = x_->full + k % cells;
    if (dead_) return false;
    if (ptx::gate_passed(gate, k / cells & 1)) return true;
    tell_all();  // nothing to do: what has been stored may as well be waited for
    dead_ = !passes(gate, k / cells);
    return !dead_;
  }
  // Piece k is on its way out of its cell; an older one has left its own.
  __device__ void give_up(unsigned k) {
    ptx::bulk_commit();
    ptx::bulk_read<unread>();
    __syncwarp();
    if (lane_ == 0 && k >= unread) ptx::gate_arrive(x_->empty + (k - unread) % cells);
  }
  // Who is waited for waits for others, and learns in time that they fail.
  __device__ bool passes(ptx::Gate* gate, unsigned round) const {
    while (!ptx::gate_passed(gate, round & 1))
      if (has_failed()) return false;
    return true;
  }

  // -- notifies: one is held back until the stores before it are complete
  __device__ void tell_all() {
    if (!noted_) return;
    ptx::bulk_stored<0>();
    tell_noted();
  }
  __device__ void tell_noted() {
    if (!noted_) return;
    unsigned since = pieces_ - due_;
    if (since >= 2) {
      ptx::bulk_stored<2>();
    } else {
      ptx::bulk_stored<0>();
    }
    __syncwarp();
    if (note_.word) ptx::store_release(note_.word, note_.value);
    noted_ = false;
  }

  __device__ Arrival verdict(bool bad) const {
    bad = __any_sync(0xffffffffu, bad);
    if (bad && lane_ == 0) *static_cast<volatile int*>(&x_->failed) = 1;
    __syncwarp();
    ptx::fence_proxy();  // what the words publish may be read by bulk copies
    return bad ? Arrival::never : Arrival::yes;
  }
  __device__ bool has_failed() const { return *static_cast<volatile const int*>(&x_->failed) != 0; }
  __device__ int role_barrier() const { return 1 + role_; }

  bool loads_;
  int lane_;
  Cells* x_;
  char* memory_;
  unsigned pieces_ = 0, loaded_ = 0, due_ = 0;
  bool noted_ = false, dead_ = false;
  Mark note_{};
  Word* counted_ = nullptr;  // a word that this lane has waited for, and what it held
  Word count_ = 0;
};

}  // namespace purlin::gpu
